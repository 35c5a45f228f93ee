"""The items of a response and their events, as the openai package's own types have them."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from inflight.frontend.agents.source import ArgumentsDelta, ContentDelta, ToolCallBegun, ToolCallEnded
from inflight.server.openai.responses.formatter import EventNumbers, ResponseItems
from inflight.server.openai.responses.tools import CallableTool
from tests.server.parsed import CUT_SHORT, WHOLE, read_events

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
PARTS = ["response.output_item.added", "response.content_part.added"]
ENDS = ["response.content_part.done", "response.output_item.done"]


def written(
    events: list[Any], complete: bool = True, **options: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    items = ResponseItems(EventNumbers(), **options)
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


CUSTOM = {"agents__edit": CallableTool("edit", "agents", is_custom=True)}


def test_custom_call_streams_its_input_as_text() -> None:
    text = 'é"\\ \n\U0001f600 end'
    arguments = json.dumps({"input": text})
    for size in (1, 3, 1000):
        pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
        calls = [ToolCallBegun(0, "agents__edit", "c1"), *(ArgumentsDelta(0, piece) for piece in pieces)]
        events, (item,) = written([*calls, ToolCallEnded(0, True)], tools=CUSTOM)
        expected = {"type": "custom_tool_call", "status": "completed", "input": text}
        assert item.items() >= {**expected, "name": "edit", "namespace": "agents", "call_id": "c1"}.items()
        kinds = [kind for kind, _ in groupby(event["type"] for event in events)]
        assert kinds == [
            "response.output_item.added",
            "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done",
            "response.output_item.done",
        ]
        assert "".join(event.get("delta", "") for event in events) == events[-2]["input"] == text


def test_truncated_custom_call_has_its_input_so_far() -> None:
    calls = [ToolCallBegun(0, "agents__edit", "c1"), ArgumentsDelta(0, '{"input": "a\\nb\\u00')]
    _, (item,) = written(calls, complete=False, tools=CUSTOM)
    assert (item["status"], item["input"]) == ("incomplete", "a\nb")


def test_reasoning_is_a_summary_if_one_was_requested() -> None:
    events, items = written(WHOLE[:2], with_summary=True)
    assert items[0]["summary"] == [{"type": "summary_text", "text": "I should add."}]
    assert items[0]["content"] == []
    assert [kind for kind, _ in groupby(event["type"] for event in events)] == [
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
    ]


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
