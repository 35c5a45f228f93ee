"""Agent packages that do not share .venv, each in a process of its own: smolagents, llama-index and dspy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.clients.more.installed import run_client
from tests.server.clients.task import ANSWER, KEY, QUESTION, Served, Toolbox, knowing_model

# Before each script: its arguments, and the two tools.
HEAD = '''
import json, sys
base_url, api_key, model, question = sys.argv[1:]
calls = []

def get_weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: Its name.
    """
    calls.append(["get_weather", {"city": city}])
    return "sunny"

def multiply(a: int, b: int) -> int:
    """Return the product of two numbers.

    Args:
        a: The first.
        b: The second.
    """
    calls.append(["multiply", {"a": a, "b": b}])
    return a * b

def finish(answer):
    print("\\f" + json.dumps([calls, str(answer)]))
'''
SMOLAGENTS = """
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel
llm = OpenAIModel(model_id=model, api_base=base_url, api_key=api_key)
tools = [tool(get_weather), tool(multiply)]
finish(ToolCallingAgent(tools=tools, model=llm, max_steps=4, verbosity_level=LogLevel.ERROR).run(question))
"""
LLAMA_INDEX = """
import asyncio
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
llm = OpenAILike(
    model=model, api_base=base_url, api_key=api_key,
    is_chat_model=True, is_function_calling_model=True, context_window=4096,
)

async def main():
    return await FunctionAgent(tools=[get_weather, multiply], llm=llm).run(question)

finish(asyncio.run(main()))
"""
DSPY = """
import dspy
dspy.configure(lm=dspy.LM(f"openai/{model}", api_base=base_url, api_key=api_key, cache=False))
finish(dspy.ReAct("question -> answer", tools=[get_weather, multiply], max_iters=3)(question=question).answer)
"""


def run_task(name: str, script: str, served: Served, toolbox: Toolbox, home: Path) -> str:
    """Return the answer of a package's agent, after adding its calls to the toolbox."""
    arguments = (served.base_url, KEY, served.model, QUESTION)
    (home / "agent.py").write_text(HEAD + script, encoding="utf-8")  # smolagents reads its tools' source
    printed = run_client(name, "-W", "ignore", "agent.py", *arguments, home=home)
    calls, answer = json.loads(printed.rpartition("\f")[2])
    toolbox.calls += [(tool, values) for tool, values in calls]
    return str(answer)


def test_llama_index_agent_completes_the_task(served: Served, toolbox: Toolbox, tmp_path: Path) -> None:
    toolbox.check(run_task("llama_index", LLAMA_INDEX, served, toolbox, tmp_path))


@knowing_model  # the built-in model was not trained on their prompts
@pytest.mark.parametrize(("name", "script"), [("smolagents", SMOLAGENTS), ("dspy", DSPY)])
def test_agent_with_a_custom_prompt_completes_the_task(
    name: str, script: str, served: Served, toolbox: Toolbox, tmp_path: Path
) -> None:
    answer = run_task(name, script, served, toolbox, tmp_path)
    toolbox.check(answer)
    assert answer == ANSWER
