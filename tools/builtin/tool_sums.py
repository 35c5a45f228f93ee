"""Sums by tools: one tool per operation, a calculator of expressions, or one tool with the operation as an argument."""

from random import Random
from typing import NamedTuple

from tools.builtin.chat_format import Call
from tools.builtin.examples import ask
from tools.builtin.grammar import capital
from tools.builtin.tool_results import Outcome, json_text
from tools.builtin.tool_tasks import Task, tool_name, typed
from tools.builtin.toolbox import TaughtTool, ToolParameter


class Operation(NamedTuple):
    key: str
    sign: str
    names: tuple[str, ...]
    describe: tuple[str, ...]
    phrases: tuple[str, ...]
    orders: tuple[str, ...]
    word: str  # between two numbers
    then: str  # goes on from a result


OPERATIONS = {
    one.key: one
    for one in (
        Operation(
            "add",
            "+",
            (
                "add",
                "sum",
                "add_numbers",
                "plus",
                "addition",
                "add_two_numbers",
                "addNumbers",
                "calculate_sum",
            ),
            (
                "Add two numbers.",
                "Adds a and b.",
                "Returns the sum of two numbers.",
                "The sum of two numbers.",
            ),
            (
                "{a} plus {b}",
                "{a} + {b}",
                "{a} plus {b}",
                "{a} and {b} together",
                "the sum of {a} and {b}",
                "{a}+{b}",
            ),
            ("add {a} and {b}", "add {a} to {b}", "sum {a} and {b}"),
            "plus",
            "add {c}",
        ),
        Operation(
            "subtract",
            "-",
            ("subtract", "minus", "difference", "subtract_numbers", "sub", "subtraction"),
            ("Subtract two numbers.", "Subtracts b from a.", "Returns the difference of two numbers."),
            ("{a} minus {b}", "{a} - {b}", "{a} minus {b}", "{a} less {b}", "{a}-{b}"),
            ("take {a} minus {b}", "calculate {a} minus {b}"),
            "minus",
            "subtract {c}",
        ),
        Operation(
            "multiply",
            "*",
            ("multiply", "product", "mul", "times", "multiply_numbers", "multiplication", "multiplyNumbers"),
            ("Multiply two numbers.", "Multiplies a and b.", "Returns the product of two numbers."),
            (
                "{a} times {b}",
                "{a} * {b}",
                "{a} x {b}",
                "{a} multiplied by {b}",
                "{a} times {b}",
                "the product of {a} and {b}",
                "{a}*{b}",
            ),
            ("multiply {a} by {b}", "multiply {a} and {b}", "multiply {a} with {b}"),
            "times",
            "multiply it by {c}",
        ),
        Operation(
            "divide",
            "/",
            ("divide", "div", "quotient", "divide_numbers", "division"),
            ("Divide two numbers.", "Divides a by b.", "Returns the quotient of two numbers."),
            ("{a} divided by {b}", "{a} / {b}", "{a} over {b}", "{a}/{b}"),
            ("divide {a} by {b}",),
            "divided by",
            "divide it by {c}",
        ),
    )
}
_ARGUMENTS = (("a", "b"), ("x", "y"), ("a", "b"), ("first", "second"), ("num1", "num2"), ("left", "right"))
_ARGUMENTS_HELD_OUT = (("n", "m"), ("first_number", "second_number"))
_CALCULATORS = (
    "calculator",
    "calculate",
    "eval",
    "compute",
    "math",
    "evaluate_expression",
    "calc",
    "solve_math",
)
_CALCULATORS_HELD_OUT = ("arithmetic", "run_calculation")
_EXPRESSION = ("expression", "formula", "expr", "input", "query", "equation")
_ASK = (
    "What is {}?",
    "What is {}?",
    "How much is {}?",
    "Calculate {}.",
    "Compute {}.",
    "What's {}?",
    "{}?",
    "Can you calculate {}?",
    "Please work out {}.",
    "Tell me {}.",
)
_ASK_HELD_OUT = ("Could you tell me what {} is?", "I need to know {}.", "What do you get for {}?")


def operation_tool(rng: Random, key: str, held_out: bool = False) -> TaughtTool:
    """`multiply(a, b)`"""
    one = OPERATIONS[key]
    names = rng.choice(_ARGUMENTS_HELD_OUT if held_out else _ARGUMENTS)
    kind = rng.choice(("number", "integer", "number", "integer", "number"))
    about = rng.choice(
        (("", ""), ("The first number.", "The second number."), ("a number", "another number"))
    )
    parameters = tuple(ToolParameter(name, kind, text) for name, text in zip(names, about, strict=True))
    return TaughtTool(key, tool_name(rng, rng.choice(one.names)), rng.choice(one.describe), parameters)


def calculator_tool(rng: Random, held_out: bool = False) -> TaughtTool:
    """`calculator(expression)`"""
    name = rng.choice(_CALCULATORS_HELD_OUT if held_out else _CALCULATORS)
    describe = rng.choice(
        (
            "Calculate an expression.",
            "Evaluates a math expression.",
            "A calculator.",
            "Useful for math.",
            "Computes the value of an arithmetic expression such as 2 + 3.",
        )
    )
    about = rng.choice(("", "The expression.", "The expression to evaluate, e.g. 2 * 3", "Math expression"))
    return TaughtTool(
        "calculator",
        tool_name(rng, name),
        describe,
        (ToolParameter(rng.choice(_EXPRESSION), "string", about),),
    )


def chooser_tool(rng: Random, held_out: bool = False) -> TaughtTool:
    """`calculate(operation, a, b)`"""
    names = rng.choice(_ARGUMENTS_HELD_OUT if held_out else _ARGUMENTS)
    operation = ToolParameter(
        rng.choice(("operation", "op", "operator")), "string", "", True, tuple(OPERATIONS)
    )
    numbers = tuple(ToolParameter(name, "number") for name in names)
    name = tool_name(rng, rng.choice(("calculate", "calculator", "compute", "arithmetic")))
    parameters = (operation, *numbers) if rng.random() < 0.6 else (*numbers, operation)
    return TaughtTool(
        "chooser", name, rng.choice(("Calculate with two numbers.", "Basic arithmetic.")), parameters
    )


def _digits(rng: Random) -> str:
    whole = str(rng.randint(0, 10 ** rng.choice((1, 2, 2, 2, 3, 3, 4, 5)) - 1))
    roll = rng.random()
    if roll < 0.08:
        return f"{whole}.{rng.randint(1, 99)}"
    return f"-{whole}" if roll < 0.1 and whole != "0" else whole


def shown(value: float) -> str:
    """A result as a program prints it."""
    return str(int(value)) if value == int(value) else str(round(value, 4))


def result_of(key: str, a: str, b: str) -> str:
    x, y = float(a), float(b)
    if key == "divide":
        return shown(x / y) if y else "0"
    return shown({"add": x + y, "subtract": x - y, "multiply": x * y}[key])


def operands(rng: Random, key: str, kind: str) -> tuple[str, str]:
    while True:
        a, b = _digits(rng), _digits(rng)
        if kind == "integer" and "." in a + b:
            continue
        if key != "divide" or float(b) != 0:
            return a, b


def call_for(tool: TaughtTool, key: str, a: str, b: str) -> Call:
    """The call that computes `a (key) b` by this tool."""
    if tool.family == "calculator":
        return Call(tool.name, {tool.parameters[0].name: f"{a} {OPERATIONS[key].sign} {b}"})
    values = iter((a, b))
    arguments = {one.name: key if one.options else typed(next(values), one.type) for one in tool.parameters}
    return Call(tool.name, arguments)


def told(rng: Random, subject: str, value: str) -> Outcome:
    """The value in one of its forms; `subject` is what the answer begins with."""
    roll = rng.random()
    answer = capital(f"{subject} is {value}.")
    if roll < 0.55:
        return Outcome(value, answer, (value,))
    if roll < 0.8:
        key = rng.choice(("result", "value", "answer", "output"))
        return Outcome(json_text(rng, {key: float(value) if "." in value else int(value)}), answer, (value,))
    sentence = rng.choice(("The result is {}.", "Result: {}", "= {}", "The answer is {}"))
    return Outcome(sentence.format(value), answer, (value,))


def sum_task(rng: Random, tool: TaughtTool, held_out: bool = False) -> Task:
    """A sum that this tool computes."""
    key = tool.family if tool.family in OPERATIONS else rng.choice(tuple(OPERATIONS))
    one, kind = OPERATIONS[key], tool.parameters[0].type
    a, b = operands(rng, key, kind)
    if rng.random() < 0.2:
        order = rng.choice(one.orders)
        question = ask(rng, rng.choice((capital(order) + ".", f"Please {order}.", f"Can you {order}?")))
        phrase, do, subject = "", order.format(a=a, b=b), "the result"
    else:
        phrase = rng.choice(one.phrases)
        question = ask(rng, rng.choice(_ASK_HELD_OUT if held_out else _ASK).format(phrase))
        do, phrase = "", phrase.format(a=a, b=b)
        subject = phrase
    value = result_of(key, a, b)
    return Task(question.format(a=a, b=b), phrase, do, call_for(tool, key, a, b), told(rng, subject, value))


def expression_task(rng: Random, tool: TaughtTool) -> Task:
    """An expression of several operations, which a calculator takes as it is."""
    a, b, c = (_digits(rng).lstrip("-") for _ in range(3))
    first, second = (rng.choice(tuple(OPERATIONS.values())) for _ in range(2))
    form = rng.choice(("{a} {p} {b} {q} {c}", "({a} {p} {b}) {q} {c}", "{a} {p} ({b} {q} {c})"))
    text = form.format(a=a, b=b, c=c, p=first.sign, q=second.sign)
    said = text
    if "(" not in form and rng.random() < 0.6:
        said = form.format(a=a, b=b, c=c, p=first.word, q=second.word)
    question = ask(rng, rng.choice(_ASK)).format(said)
    value = shown(rng.randint(-999, 99_999) / rng.choice((1, 1, 10)))  # the model is to trust the tool
    return Task(question, said, "", Call(tool.name, {tool.parameters[0].name: text}), told(rng, said, value))


def chained_tasks(rng: Random, tools: tuple[TaughtTool, TaughtTool]) -> tuple[str, tuple[Task, Task]]:
    """Two sums, the second of which goes on from the result of the first."""
    keys = [tool.family if tool.family in OPERATIONS else rng.choice(tuple(OPERATIONS)) for tool in tools]
    first, second = OPERATIONS[keys[0]], OPERATIONS[keys[1]]
    a, b = operands(rng, keys[0], "integer")
    middle = result_of(keys[0], a, b)
    if "." in middle:
        return chained_tasks(rng, tools)
    c = str(rng.randint(2, 999))
    value = result_of(keys[1], middle, c)
    order, phrase, then = rng.choice(first.orders), rng.choice(first.phrases[:2]), second.then
    question = rng.choice(
        (
            capital(order) + f", then {then.replace('it', 'the result')}.",
            capital(order) + f" and then {then}.",
            f"What is {phrase}? Then {then}.",
            f"Calculate {phrase}, and then {then}.",
            f"First {order}. Then {then}.",
            f"What is {phrase}, {second.word} {{c}}?",
            f"How much is {phrase} and then {second.word} {{c}}?",
        )
    ).format(a=a, b=b, c=c)
    one, two = call_for(tools[0], keys[0], a, b), call_for(tools[1], keys[1], middle, c)
    return question, (
        Task(question, "", order.format(a=a, b=b), one, told(rng, "the result", middle)),
        Task(question, "", then.format(c=c), two, told(rng, "the result", value)),
    )
