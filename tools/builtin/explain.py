"""Explanations, instructions, jobs, comparisons and advice: answers of a sentence to several paragraphs."""

from collections.abc import Sequence
from random import Random

from tools.builtin import lexicon
from tools.builtin.examples import Example, ask, request
from tools.builtin.grammar import a, capital, join, number, pick_other, plural
from tools.builtin.tables import Sections, sections

TOPICS = sections("topics")
SERVING = sections("serving")
HOWTO = sections("howto")
ADVICE = sections("advice")

_SHORT = (
    "{} Answer briefly.",
    "{} Be brief.",
    "Briefly: {}",
    "{} Answer in one sentence.",
    "{} Keep it short.",
    "In one sentence: {}",
    "{} A short answer, please.",
)
_LONG = (
    "{} Explain in detail.",
    "{} Please explain it step by step.",
    "Explain in detail: {}",
    "{} Tell me more.",
)
_KEYWORD = (
    "Tell me about {}.",
    "Explain {}.",
    "Can you explain {}?",
    "Could you explain {} to me?",
    "What can you tell me about {}?",
    "What do you know about {}?",
    "I want to know more about {}.",
    "I do not understand {}.",
    "Explain {} like I am five.",
    "Please explain {} in simple words.",
    "I have a question about {}. How does it work?",
    "Teach me something about {}.",
    "Why should I care about {}?",
    "My friend asked me about {}. What should I say?",
    "Give me a short explanation of {}.",
    "{}",
    "{}?",
)
_SIMPLY = ("{} Explain it to a child.", "{} Use simple words.", "Explain simply: {}")


def variant(rng: Random, line: str) -> str:
    """One of the ways to say the same, which a bar separates."""
    return rng.choice(line.split("|")).strip()


def _by_keyword(rng: Random, keywords: Sequence[str]) -> str:
    """Another way to ask for a topic, so that the model listens for the word and not for the sentence."""
    return rng.choice(_KEYWORD).format(rng.choice(keywords))


def explanation(rng: Random, topics: Sections, kind: str) -> Example:
    """A question about a topic, answered at the length that the question asks for."""
    topic = topics[rng.choice(tuple(topics))]
    question = rng.choice(topic["ask"]) if rng.random() < 0.6 else _by_keyword(rng, topic["about"])
    one = variant(rng, rng.choice(topic["one"]))
    steps = [variant(rng, line) for line in topic["more"]]
    roll = rng.random()
    if roll < 0.15:
        return Example(kind, (rng.choice(_SHORT).format(question), one))
    if roll < 0.35:
        half = max(2, len(steps) // 2)
        text = f"{one} {' '.join(steps[:half])}\n\n{' '.join(steps[half:])}".strip()
        return Example(kind, (rng.choice(_LONG).format(question), text))
    prompt = rng.choice(_SIMPLY).format(question) if roll < 0.42 else ask(rng, question)
    if roll < 0.55:
        return Example(kind, (prompt, one))
    if roll < 0.8:
        return Example(kind, (prompt, f"{one} {' '.join(steps[: rng.randint(1, 3)])}"))
    return Example(kind, (prompt, f"{one} {' '.join(steps)}"))


def why(rng: Random) -> Example:
    return explanation(rng, TOPICS, "explain")


def serving(rng: Random) -> Example:
    return explanation(rng, SERVING, "serving")


def how_to(rng: Random) -> Example:
    """`How do I bake bread?`: numbered steps, or a paragraph with `first` and `then`."""
    recipe = HOWTO[rng.choice(tuple(HOWTO))]
    do = rng.choice(recipe["do"])
    steps = [variant(rng, line) for line in recipe["step"]]
    tip, need = variant(rng, recipe["tip"][0]), recipe["need"][0]
    question = rng.choice(
        (
            "How do I {}?",
            "How can I {}?",
            "How do you {}?",
            "Tell me how to {}.",
            "Explain how to {}.",
            "Give me the steps to {}.",
            "How to {}?",
            "I want to {}. What should I do?",
            "What do I need to {}?",
        )
    ).format(do)
    if rng.random() < 0.15:
        # A word more must not lead the answer astray.
        question = question.replace(
            " a ", rng.choice((" a good ", " a really good ", " a nice ", " my first ")), 1
        )
    yours = do.replace(" my ", " your ")
    if question.startswith("What do I need"):
        return Example("howto", (ask(rng, question), f"To {yours}, you need {need}."), (do,))
    if rng.random() < 0.6:
        lead = rng.choice(
            (f"Here is how to {yours}:", f"To {yours}, you need {need}.", "Follow these steps:")
        )
        listed = "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
        end = f"\n\n{tip}" if rng.random() < 0.6 else ""
        return Example("howto", (ask(rng, question), f"{lead}\n\n{listed}{end}"), (do,))
    lead = rng.choice((f"To {yours}, you need {need}.", f"It is not difficult to {yours}."))
    return Example("howto", (ask(rng, question), f"{lead} {in_order(rng, steps)} {tip}"), (do,))


def in_order(rng: Random, steps: list[str]) -> str:
    """The steps as running text, some with a word that says their order."""
    middles = ("Then ", "After that, ", "Next, ", "")
    told = []
    for index, step in enumerate(steps):
        first_words = step.split(" ", 1)[0]
        plain = first_words in ("First", "When", "After", "Now", "Then", "Before", "At", "If", "To", "Always")
        lead = "" if plain else "First, " if index == 0 else rng.choice(middles)
        if index == len(steps) - 1 and not plain:
            lead = rng.choice(("Finally, ", "At the end, ", ""))
        told.append(lead + (step[:1].lower() + step[1:] if lead else step))
    return " ".join(told)


def job(rng: Random) -> Example:
    """`What does a baker do?`"""
    work = rng.choice(lexicon.JOBS)
    one = a(work.noun)
    question = rng.choice(
        (
            f"What does {one} do?",
            f"What is {one}?",
            f"What is the job of {one}?",
            f"Tell me about the work of {one}.",
            f"Where does {one} work?",
            f"Why do we need {plural(work.noun)}?",
            f"What tools does {one} use?",
        )
    )
    does = f"{capital(one)} {work.does}."
    works = f"{capital(one)} works {work.place}."
    tools = rng.choice(("For this work, {} needs {}.", "The tools of {} are {}.")).format(one, work.tools)
    thanks = rng.choice(("Because of {}, people {}.", "Thanks to {}, people {}.")).format(
        plural(work.noun), work.helps
    )
    if question.startswith("Where"):
        parts = [works, does] if rng.random() < 0.4 else [works]
    elif question.startswith("Why"):
        parts = [thanks, does] if rng.random() < 0.5 else [thanks]
    elif question.startswith("What tools"):
        parts = [f"{capital(one)} uses {work.tools}."]
    else:
        parts = [does, *rng.sample((works, tools, thanks), rng.randint(0, 3))]
    return Example("job", (ask(rng, question), " ".join(parts)), (work.noun,))


def comparison(rng: Random) -> Example:
    """`What is the difference between a cat and a dog?`, from what is known about the two."""
    x = rng.choice(lexicon.ANIMALS)
    y = pick_other(rng, lexicon.ANIMALS, x)
    question = rng.choice(
        (
            "What is the difference between {} and {}?",
            "Compare {} and {}.",
            "How are {} and {} different?",
            "What do {} and {} have in common?",
            "Tell me the difference between {} and {}.",
        )
    ).format(a(x.noun), a(y.noun))
    many = f"{capital(plural(x.noun))} and {plural(y.noun)}"
    same = []
    if x.legs == y.legs and x.legs:
        same.append(f"both have {number(x.legs)} legs")
    if x.home == y.home:
        same.append(f"both live {x.home}")
    if x.food == y.food:
        same.append(f"both eat {x.food}")
    common = f"{many} are alike in some ways: {join(same)}." if same else f"{many} are both animals."
    differences = []
    if x.home != y.home:
        differences.append(f"{capital(a(x.noun))} lives {x.home}, but {a(y.noun)} lives {y.home}.")
    if x.food != y.food:
        differences.append(f"{capital(a(x.noun))} eats {x.food}, while {a(y.noun)} eats {y.food}.")
    differences.append(f"{capital(a(x.noun))} has {x.body}, and {a(y.noun)} has {y.body}.")
    differences.append(f"{capital(a(x.noun))} can {x.can}, and {a(y.noun)} can {y.can}.")
    if x.legs != y.legs:
        count = [f"{number(n)} legs" if n else "no legs" for n in (x.legs, y.legs)]
        differences.append(f"{capital(a(x.noun))} has {count[0]}, but {a(y.noun)} has {count[1]}.")
    if "common" in question:
        return Example("compare", (ask(rng, question), common), (x.noun, y.noun))
    rng.shuffle(differences)
    told = differences[: rng.randint(1, len(differences))]
    if len(told) > 2:
        told = [common, *told] if rng.random() < 0.5 else [*told, common]
    return Example("compare", (ask(rng, question), " ".join(told)), (x.noun, y.noun))


def about_animal(rng: Random) -> Example:
    """`Tell me about owls.`: a paragraph."""
    animal = rng.choice(lexicon.ANIMALS)
    one, many = a(animal.noun), plural(animal.noun)
    question = rng.choice(
        (
            f"Tell me about {many}.",
            f"What do you know about {many}?",
            f"Describe {one}.",
            f"What is {one}?",
            f"Write a paragraph about {one}.",
            f"Tell me something about the {animal.noun}.",
            f"{capital(many)}",
        )
    )
    facts = [
        rng.choice((f"{capital(many)} live {animal.home}.", f"{capital(one)} lives {animal.home}.")),
        rng.choice((f"They eat {animal.food}.", f"Their food is {animal.food}.")),
        rng.choice((f"It has {animal.body}.", f"It is easy to recognize: it has {animal.body}.")),
        rng.choice((f"{capital(one)} can {animal.can}.", f"It can {animal.can}.")),
    ]
    if animal.young != "baby":
        facts.append(f"A young {animal.noun} is called {a(animal.young)}.")
    if animal.says:
        facts.append(rng.choice((f'It says "{animal.says}".', f'Its sound is "{animal.says}".')))
    chosen = facts[:1] + rng.sample(facts[1:], rng.randint(1, len(facts) - 1))
    end = rng.choice(("", "", f" I like {many} very much.", f" {capital(many)} are wonderful animals."))
    return Example("animal", (ask(rng, question), " ".join(chosen) + end), (animal.noun,))


def advice(rng: Random) -> Example:
    """`I am sad.`, `I cannot sleep.`: a few kind sentences."""
    trouble = ADVICE[rng.choice(tuple(ADVICE))]
    prompt, kind = rng.choice(trouble["say"]), rng.choice(ADVICE["comfort"]["kind"])
    if trouble is ADVICE["comfort"]:
        return advice(rng)
    lines = rng.sample(trouble["do"], rng.randint(1, len(trouble["do"])))
    question = rng.choice(
        (
            "",
            "",
            " What can I do?",
            " What should I do?",
            " Can you help me?",
            " Do you have any advice?",
            " Any ideas?",
        )
    )
    if rng.random() < 0.12:
        order = request(rng, f"give me advice for someone who says: {prompt.rstrip('.')}")
        return Example("advice", (order, f"{' '.join(lines)}"))
    return Example("advice", (ask(rng, prompt + question), f"{kind} {' '.join(lines)}"))
