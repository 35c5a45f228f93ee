"""Which tools a chat offers, drawn by family, and a task for any of them."""

from random import Random

from tools.builtin import tool_sums
from tools.builtin.tool_forms import form_task, form_tool
from tools.builtin.tool_names import Naming, renamed
from tools.builtin.tool_people import person_task
from tools.builtin.tool_tasks import DATA_FAMILIES, Task, data_task, data_tool
from tools.builtin.toolbox import TaughtTool

SUMS = ("add", "subtract", "multiply", "divide")
# The taught ones come most often; the others make it look at names and descriptions.
FAMILIES = (
    *("weather",) * 5,
    *("time",) * 4,
    *("lookup",) * 4,
    *("sums",) * 7,
    *("attribute",) * 4,
    *("form",) * 6,
    *DATA_FAMILIES,
)
_COMMON_FAMILIES = (*("weather",) * 3, *("time",) * 2, *("lookup",) * 2, *("sums",) * 4)


def _sum_tools(rng: Random, held_out: bool) -> list[TaughtTool]:
    """Tools for sums in one style: two styles at once would leave open which to call."""
    roll = rng.random()
    if roll < 0.3:
        return [tool_sums.calculator_tool(rng, held_out)]
    if roll < 0.4:
        return [tool_sums.chooser_tool(rng, held_out)]
    keys = rng.sample(SUMS, rng.choice((1, 2, 2, 3, 4)))
    return [tool_sums.operation_tool(rng, key, held_out) for key in keys]


def family_tools(rng: Random, family: str, naming: Naming, held_out: bool) -> list[TaughtTool]:
    if family == "form":
        return [form_tool(rng, naming, held_out)]
    tools = _sum_tools(rng, held_out) if family == "sums" else [data_tool(rng, family, held_out)]
    return [renamed(rng, tool, naming, held_out) for tool in tools]


def draw_tools(rng: Random, naming: Naming, held_out: bool, num_families: int) -> list[TaughtTool]:
    """Tools of different families, with different names."""
    found: list[TaughtTool] = []
    families: set[str] = set()
    for _ in range(num_families):
        family = rng.choice(_COMMON_FAMILIES if naming == "common" and num_families < 4 else FAMILIES)
        if family in families and family not in ("attribute", "form"):
            continue
        if family in ("now", "time") and families & {"now", "time"}:
            continue
        families.add(family)
        for tool in family_tools(rng, family, naming, held_out):
            clash = any(tool.name == one.name or (tool.noun and tool.noun == one.noun) for one in found)
            if not clash:
                found.append(tool)
    return found


def task_for(rng: Random, tool: TaughtTool, held_out: bool) -> Task:
    if tool.family == "person":
        return person_task(rng, tool, held_out)
    if tool.family == "form":
        return form_task(rng, tool, held_out)
    if tool.family == "calculator" and rng.random() < 0.3:
        return tool_sums.expression_task(rng, tool)
    if tool.family in (*SUMS, "calculator", "chooser"):
        return tool_sums.sum_task(rng, tool, held_out)
    return data_task(rng, tool, held_out)
