"""Data about a person out of a sentence, as the arguments of a tool or as JSON: `Anna is 31 years old.`"""

from random import Random
from typing import Any

from tools.builtin import tool_values
from tools.builtin.chat_format import Call
from tools.builtin.grammar import a
from tools.builtin.tool_results import Outcome
from tools.builtin.tool_tasks import Task
from tools.builtin.toolbox import TaughtTool, ToolParameter

_NAMES = (
    "final_result",
    "Person",
    "User",
    "UserInfo",
    "UserDetail",
    "PersonInfo",
    "extract_person",
    "save_person",
    "add_user",
    "create_user",
    "Character",
    "Contact",
    "return_person",
    "PersonModel",
    "final_result_Person",
)
_NAMES_HELD_OUT = ("Human", "UserExtract", "Profile", "register_person")
_DESCRIBE = (
    "The final response which ends this conversation",
    "Correctly extracted `{name}` with all the required parameters with correct types",
    "Extract a person.",
    "A person with name and age.",
    "Save the data of a person.",
    "Stores a user.",
    "The user of the text.",
)
_FIELDS = {
    "name": ("name", "name", "name", "full_name", "person_name", "username", "first_name"),
    "age": ("age", "age", "age", "years", "age_in_years"),
    "city": ("city", "location", "home", "lives_in"),
    "job": ("job", "occupation", "profession", "role"),
}
_ABOUT = {
    "name": ("", "The name.", "The name of the person", "Full name"),
    "age": ("", "The age.", "Age in years", "How old the person is"),
    "city": ("", "Where the person lives"),
    "job": ("", "What the person does"),
}
_SENTENCES = {
    ("age", "name"): (
        "{name} is {age} years old.",
        "{name} is {age}.",
        "My name is {name} and I am {age} years old.",
        "I am {name}, {age} years old.",
        "{name}, age {age}",
        "{name} ({age})",
        "Name: {name}, Age: {age}",
        "{name} is a {age} year old person.",
        "{name} turned {age} last week.",
        "This is {name}. {name} is {age} years old.",
        "I met {name} yesterday, who is {age}.",
        "name {name} age {age}",
    ),
    ("age", "city", "name"): (
        "{name} is {age} years old and lives in {city}.",
        "{name}, {age}, lives in {city}.",
        "My name is {name}, I am {age} and I live in {city}.",
        "{name} from {city} is {age} years old.",
    ),
    ("age", "job", "name"): (
        "{name} is {age} years old and works as {a_job}.",
        "{name} is {a_job} and {age} years old.",
        "{name}, {a_job}, is {age}.",
    ),
    ("city", "name"): (
        "{name} lives in {city}.",
        "{name} is from {city}.",
        "My name is {name} and I live in {city}.",
    ),
}
_LEADS = (
    "{}",
    "{}",
    "{}",
    "Extract: {}",
    "Extract the person: {}",
    "Extract the user from this text: {}",
    "Extract the name and the age: {}",
    "Extract {}",
    "Who is this about? {}",
    "Parse this: {}",
    "Get the data from: {}",
    "Extract the information from the following sentence:\n{}",
)
_RESULTS = ("ok", "saved", "done", "Final result processed.", "user 7 created", "stored")


def person_tool(rng: Random, held_out: bool = False) -> TaughtTool:
    kinds = list(rng.choice([("age", "name")] * 5 + list(_SENTENCES)))
    if rng.random() < 0.7:
        kinds.sort(key=tuple(_FIELDS).index)
    else:
        rng.shuffle(kinds)
    name = rng.choice(_NAMES_HELD_OUT if held_out else _NAMES)
    parameters = []
    for kind in kinds:
        type_of = rng.choice(("integer", "integer", "integer", "number")) if kind == "age" else "string"
        parameters.append(ToolParameter(rng.choice(_FIELDS[kind]), type_of, rng.choice(_ABOUT[kind])))
    return TaughtTool(
        "person", name, rng.choice(_DESCRIBE).format(name=name), tuple(parameters), "|".join(kinds)
    )


def person(rng: Random, kinds: list[str], held_out: bool) -> tuple[str, dict[str, Any]]:
    """A sentence with these facts (and maybe more), and the facts."""
    key = tuple(sorted(kinds))
    if key == ("age", "name") and rng.random() < 0.25:
        key = rng.choice((("age", "city", "name"), ("age", "job", "name")))
    job = rng.choice(tool_values.words("job"))
    facts: dict[str, Any] = {
        "name": tool_values.name(rng, held_out),
        "age": rng.randint(1, 99),
        "city": tool_values.city(rng, held_out).partition(",")[0],
        "job": job,
    }
    sentence = rng.choice(_SENTENCES[key]).format(**facts, a_job=a(job))
    return sentence, {kind: facts[kind] for kind in kinds}


def person_task(rng: Random, tool: TaughtTool, held_out: bool = False) -> Task:
    kinds = tool.noun.split("|")
    sentence, facts = person(rng, kinds, held_out)
    arguments = {one.name: facts[kind] for one, kind in zip(tool.parameters, kinds, strict=True)}
    result = rng.choice(_RESULTS)
    return Task(
        rng.choice(_LEADS).format(sentence),
        "",
        f"note what is said about {facts['name']}",
        Call(tool.name, arguments),
        Outcome(result, f"I noted {facts['name']}: {result.rstrip('.')}.", (str(facts["name"]),)),
    )


def extraction(rng: Random, held_out: bool = False) -> tuple[str, dict[str, Any]]:
    """A request without tools, whose answer is JSON."""
    kinds = ["name", "age"] if rng.random() < 0.8 else list(rng.choice(list(_SENTENCES)))
    kinds.sort(key=tuple(_FIELDS).index)
    sentence, facts = person(rng, kinds, held_out)
    return rng.choice(_LEADS[3:]).format(sentence), facts
