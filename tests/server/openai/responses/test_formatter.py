"""The items of a response and their events, as the openai package's own types have them."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from inflight.agents import ContentDelta
from inflight.server.openai.responses.formatter import EventNumbers, ResponseItems
from tests.server.parsed import CUT_SHORT, WHOLE, read_events

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
PARTS = ["response.output_item.added", "response.content_part.added"]
ENDS = ["response.content_part.done", "response.output_item.done"]


def written(events: list[Any], complete: bool = True) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    items = ResponseItems(EventNumbers())
    told = read_events(items.write(events) + items.finish(complete))
    for event in told:
        EVENT.validate_python(event)
    for item in items.items:
        ITEM.validate_python(item)
    return told, items.items


def test_the_order_of_events() -> None:
    told, _ = written(WHOLE)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert [kind for kind, _ in groupby(event["type"] for event in told)] == [
        *(*PARTS, "response.reasoning_text.delta", "response.reasoning_text.done", *ENDS),
        *(*PARTS, "response.output_text.delta", "response.output_text.done", *ENDS),
        *(*call, *call),
    ]


def test_deltas_and_ids_add_up_to_the_items() -> None:
    told, items = written(WHOLE)
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert {item["status"] for item in items} == {"completed"}
    texts = ["", "", "", ""]
    for event in told:
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
        texts[event["output_index"]] += event.get("delta", "")
        if event["type"] == "response.output_item.done":
            assert event["item"] == items[event["output_index"]]
    assert texts == ["I should add.", "Let me add.", '{"a": 1}', "{}"]
    assert items[0]["content"][0]["text"] == texts[0]
    assert items[1]["content"][0]["text"] == texts[1]
    assert [(item["name"], item["arguments"]) for item in items[2:]] == [("add", texts[2]), ("now", texts[3])]
    assert items[2]["call_id"] == "call_1"
    assert items[3]["call_id"].startswith("call_")
    assert len({item["id"] for item in items}) == 4


def test_what_was_cut_short_says_so() -> None:
    assert [item["status"] for item in written(CUT_SHORT, False)[1]] == ["incomplete"]
    _, (item,) = written([ContentDelta("Once upon")], False)
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Once upon")


def test_an_empty_answer_is_an_empty_message() -> None:
    told, (item,) = written([])
    assert item["content"][0]["text"] == ""
    assert told[-1]["item"] == item


def test_what_is_there_so_far() -> None:
    items = ResponseItems(EventNumbers())
    items.write(WHOLE[:3])
    assert [(item["status"], item["content"][0]["text"]) for item in items.so_far()] == [
        ("completed", "I should add."),
        ("in_progress", "Let me "),
    ]
    items.write(WHOLE[3:6])
    assert items.so_far()[-1]["arguments"] == '{"a": '
