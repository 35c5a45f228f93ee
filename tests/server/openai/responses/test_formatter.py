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
    written_events = read_events(items.write(events) + items.finish(complete))
    for event in written_events:
        EVENT.validate_python(event)
    for item in items.items:
        ITEM.validate_python(item)
    return written_events, items.items


def test_events_come_in_the_documented_order() -> None:
    written_events, _ = written(WHOLE)
    assert [event["sequence_number"] for event in written_events] == list(range(len(written_events)))
    call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert [kind for kind, _ in groupby(event["type"] for event in written_events)] == [
        *(*PARTS, "response.reasoning_text.delta", "response.reasoning_text.done", *ENDS),
        *(*PARTS, "response.output_text.delta", "response.output_text.done", *ENDS),
        *(*call, *call),
    ]


def test_deltas_and_ids_add_up_to_the_items() -> None:
    written_events, items = written(WHOLE)
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert {item["status"] for item in items} == {"completed"}
    texts = ["", "", "", ""]
    for event in written_events:
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


def test_truncated_items_are_incomplete() -> None:
    assert [item["status"] for item in written(CUT_SHORT, False)[1]] == ["incomplete"]
    _, (item,) = written([ContentDelta("Once upon")], False)
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Once upon")


def test_empty_answer_has_an_empty_message() -> None:
    written_events, (item,) = written([])
    assert item["content"][0]["text"] == ""
    assert written_events[-1]["item"] == item


def test_items_so_far_include_the_open_one() -> None:
    items = ResponseItems(EventNumbers())
    items.write(WHOLE[:3])
    assert [(item["status"], item["content"][0]["text"]) for item in items.so_far()] == [
        ("completed", "I should add."),
        ("in_progress", "Let me "),
    ]
    items.write(WHOLE[3:6])
    assert items.so_far()[-1]["arguments"] == '{"a": '
