"""langchain against a live server, and an agent of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from tests.server.clients.task import KEY, MESSAGES, REPORT, Report, Served, Toolbox, knowing_model
from tests.server.clients.task import QUESTION as TASK

QUESTION = MESSAGES[0]["content"]


pytestmark = pytest.mark.usefixtures("leave_nothing_open")


@pytest.fixture(autouse=True)
def _no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")  # nothing leaves this machine


def model_of(served: Served, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_openai import ChatOpenAI
    key: Any = KEY
    return ChatOpenAI(model=served.model, base_url=served.base_url, api_key=key, max_retries=0, **options)


@pytest.fixture
def chat(builtin: Served) -> Any:
    return model_of(builtin, temperature=0, max_completion_tokens=24)


def test_invoke_returns_text_and_usage(chat: Any, text: str) -> None:
    answer = chat.invoke(QUESTION)
    assert answer.content == text
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.usage_metadata["output_tokens"] > 0
    again = chat.invoke([("user", QUESTION), answer, ("user", "Why?")])  # an answer sent back
    assert again.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


def test_stream_and_batch_return_the_same_text(chat: Any, text: str) -> None:
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == text
    assert len([chunk for chunk in chunks if chunk.content]) > 1
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0
    answers = chat.batch([QUESTION] * 8)
    assert [answer.content for answer in answers] == [text] * 8


async def test_async_stream_returns_the_same_text(chat: Any, text: str) -> None:
    assert (await chat.ainvoke(QUESTION)).content == text
    assert "".join([chunk.content async for chunk in chat.astream(QUESTION)]) == text
    await chat.root_async_client.close()


def test_completions_match_an_offline_run(builtin: Served, llm: LLM) -> None:
    from langchain_openai import OpenAI

    key: Any = KEY
    base_url = builtin.base_url
    client = OpenAI(
        model=builtin.model, base_url=base_url, api_key=key, temperature=0, max_tokens=8, max_retries=0
    )
    whole = llm.generate("A fox", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    assert client.invoke("A fox") == whole
    assert "".join(client.stream("A fox")) == whole
    assert client.batch(["A fox"] * 3) == [whole] * 3


def test_errors_are_raised(chat: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="functions is not supported here"):
        chat.bind(functions=[{"name": "f"}]).invoke(QUESTION)


# ---- agents ----


@pytest.mark.parametrize("responses", [False, True])
def test_agent_completes_the_task(served: Served, toolbox: Toolbox, responses: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain.agents import create_agent

    agent: Any = create_agent(model_of(served, use_responses_api=responses), tools=list(toolbox.functions()))
    state = agent.invoke({"messages": [("user", TASK)]})
    toolbox.check(state["messages"][-1].text)


def test_streaming_agent_completes_the_task(served: Served, toolbox: Toolbox) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain.agents import create_agent

    agent: Any = create_agent(model_of(served), tools=list(toolbox.functions()))
    said = ""
    for piece, _ in agent.stream({"messages": [("user", TASK)]}, stream_mode="messages"):
        said += piece.text if piece.type == "AIMessageChunk" else ""
    toolbox.check(said)


def test_langgraph_runs_the_task_as_a_graph(served: Served, toolbox: Toolbox) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_core.tools import tool
        from langgraph.graph import START, MessagesState, StateGraph
        from langgraph.prebuilt import ToolNode, tools_condition

    tools = [tool(function) for function in toolbox.functions()]
    model: Any = model_of(served).bind_tools(tools)
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    state = graph.compile().invoke({"messages": [("user", TASK)]})
    toolbox.check(state["messages"][-1].text)


@knowing_model
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_object_is_parsed(served: Served, method: str) -> None:
    assert model_of(served).with_structured_output(Report, method=method).invoke(TASK) == REPORT
