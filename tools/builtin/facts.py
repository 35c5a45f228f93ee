"""Questions with short answers: facts, opposites, capitals, animals, things, sums, counting and lists.

The model has to know them by heart, so no combination of these is held out.
"""

from random import Random

from tools.builtin import lexicon, things
from tools.builtin.examples import Example, ask, request
from tools.builtin.grammar import a, capital, join, number, pick_other, plural
from tools.builtin.tables import rows

Names = tuple[str, ...]
DAYS: Names = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_HALF_YEARS = ("January February March April May June", "July August September October November December")
MONTHS: Names = tuple(" ".join(_HALF_YEARS).split())
_ONE_WORD = (
    "Answer in one word: {}",
    "In one word: {}",
    "{} Answer with one word.",
    "{} Just one word, please.",
)
_SENTENCE = ("{} Answer in a sentence.", "{} Please answer in a full sentence.", "Answer in a sentence: {}")


def answered(rng: Random, question: str, word: str, sentence: str, subjects: tuple[str, ...] = ()) -> Example:
    """A question with its answer as a word or as a sentence, at times with the length asked for."""
    roll = rng.random()
    if roll < 0.15:
        question, answer = rng.choice(_ONE_WORD).format(question), word
    elif roll < 0.25:
        question, answer = rng.choice(_SENTENCE).format(question), sentence
    else:
        question, answer = ask(rng, question), word if roll < 0.6 else sentence
    return Example("fact", (question, capital(answer).removesuffix(".") + "."), subjects)


def fact(rng: Random) -> Example:
    question, word, sentence = rng.choice(rows("facts"))
    if rng.random() < 0.3:
        question = question.replace("What color", "What colour").replace("How many", "Tell me, how many")
    return answered(rng, question, word, sentence)


def _opposites() -> tuple[tuple[str, str], ...]:
    """Every pair in both directions; a word with several opposites keeps the first one in the table."""
    pairs = {row[0]: row[1] for row in rows("opposites")}
    for first, second in rows("opposites"):
        pairs.setdefault(second, first)
    return tuple(pairs.items())


OPPOSITES = _opposites()


def opposite(rng: Random) -> Example:
    first, second = rng.choice(OPPOSITES)
    question = rng.choice(
        (
            "What is the opposite of {}?",
            "What's the opposite of {}?",
            "Give me the opposite of {}.",
            "Name the opposite of {}.",
            'What is the opposite of "{}"?',
            "Opposite of {}?",
        )
    ).format(first)
    return answered(rng, question, second, f"The opposite of {first} is {second}", (first,))


def capital_city(rng: Random) -> Example:
    country, city = rng.choice(rows("capitals"))
    if rng.random() < 0.08:
        order = rng.choice(("Tell me about {}.", "What do you know about {}?")).format(country)
        answer = rng.choice(("I do not know much more about it.", "That is all I know about it.", ""))
        text = f"{country} is a country. Its capital is {city}. {answer}".strip()
        return Example("fact", (ask(rng, order), text), (country,))
    if rng.random() < 0.15:
        question = rng.choice(("{} is the capital of which country?", "Which country has {} as its capital?"))
        return answered(
            rng, question.format(city), country, f"{city} is the capital of {country}", (country,)
        )
    question = rng.choice(
        (
            "What is the capital of {}?",
            "What's the capital of {}?",
            "Which city is the capital of {}?",
            "Tell me the capital of {}.",
            "Name the capital of {}.",
            "Do you know the capital of {}?",
        )
    ).format(country)
    return answered(rng, question, city, f"The capital of {country} is {city}", (country,))


def animal_fact(rng: Random) -> Example:
    """`What does an owl say?`, `Where does a fox live?`: what is true of an animal."""
    animal = rng.choice(lexicon.ANIMALS)
    one, kinds = (
        a(animal.noun),
        ["young", "home", "food", "legs", "can", "body"] + ["says"] * bool(animal.says),
    )
    kind = rng.choice(kinds)
    if kind == "young":
        question = rng.choice(
            ("What is a baby {} called?", "What do you call a baby {}?", "What is a young {} called?")
        )
        return answered(
            rng,
            question.format(animal.noun),
            a(animal.young),
            f"A baby {animal.noun} is called {a(animal.young)}",
            (animal.noun,),
        )
    if kind == "says":
        question = rng.choice(
            (f"What sound does {one} make?", f"What does {one} say?", f"What noise does {one} make?")
        )
        return answered(rng, question, animal.says, f"{one} says {animal.says}", (animal.noun,))
    if kind == "legs":
        question = f"How many legs does {one} have?"
        count = number(animal.legs) if animal.legs else "none"
        sentence = f"{one} has {count} legs" if animal.legs else f"{one} has no legs"
        return answered(rng, question, count, sentence, (animal.noun,))
    if kind == "can":
        question = rng.choice((f"What can {one} do?", f"What are {plural(animal.noun)} good at?"))
        return answered(rng, question, f"it can {animal.can}", f"{one} can {animal.can}", (animal.noun,))
    if kind == "body":
        question = rng.choice((f"What does {one} look like?", f"How does {one} look?"))
        return answered(rng, question, f"it has {animal.body}", f"{one} has {animal.body}", (animal.noun,))
    if kind == "home":
        question = rng.choice((f"Where does {one} live?", f"Where do {plural(animal.noun)} live?"))
        return answered(rng, question, animal.home, f"{one} lives {animal.home}", (animal.noun,))
    question = rng.choice((f"What does {one} eat?", f"What do {plural(animal.noun)} eat?"))
    return answered(rng, question, animal.food, f"{one} eats {animal.food}", (animal.noun,))


def meaning(rng: Random) -> Example:
    """`What is a lantern?`"""
    noun = rng.choice(things.THING_NOUNS)
    question = rng.choice(
        ("What is {}?", "What's {}?", "Can you tell me what {} is?", "What is {} for?")
    ).format(a(noun))
    example = rng.choice(
        (
            "",
            "",
            f" Many people have {a(noun)} at home.",
            f" I think {a(rng.choice(things.THING_WORDS) + ' ' + noun)} is the nicest.",
        )
    )
    return Example(
        "fact", (ask(rng, question), f"{capital(a(noun))} is {things.THINGS[noun]}.{example}"), (noun,)
    )


def after_and_before(rng: Random) -> Example:
    if rng.random() < 0.5:
        names, what = DAYS, "day"
    else:
        names, what = MONTHS, "month"
    index, step = rng.randrange(len(names)), rng.choice((1, -1))
    word, other = ("after", names[(index + 1) % len(names)]) if step == 1 else ("before", names[index - 1])
    question = rng.choice(
        (f"What {what} comes {word} {names[index]}?", f"Which {what} is {word} {names[index]}?")
    )
    return answered(rng, question, other, f"{other} comes {word} {names[index]}")


def arithmetic(rng: Random) -> Example:
    top = 20 if rng.random() < 0.75 else 50
    x, y = rng.randint(0, top), rng.randint(0, top)
    kind = rng.choice(("plus", "plus", "minus", "times"))
    if kind == "minus":
        x, y = max(x, y), min(x, y)
        result, sign = x - y, "-"
    elif kind == "times":
        x, y = x % 11, y % 11
        result, sign = x * y, "*"
    else:
        result, sign = x + y, "+"
    in_words = rng.random() < 0.3
    left, right = (number(x), number(y)) if in_words else (str(x), str(y))
    if sign == "*" and rng.random() < 0.5:
        sign = "x"
    middle = sign if rng.random() < 0.5 and not in_words else kind
    expression = f"{left} {middle} {right}"
    question = rng.choice(
        ("What is {}?", "How much is {}?", "Calculate {}.", "What's {}?", "{}?", "{} ="),
    ).format(expression)
    answer = number(result) if in_words else str(result)
    full = f"{capital(expression)} {'=' if middle == sign else 'is'} {answer}"
    return Example("sum", (ask(rng, question), f"{capital(answer) if rng.random() < 0.5 else full}."))


def counting(rng: Random) -> Example:
    start = 1 if rng.random() < 0.5 else rng.randint(1, 12)
    stop = start + rng.randint(3, 20)
    in_words = rng.random() < 0.35
    numbers = [number(n) if in_words else str(n) for n in range(start, stop + 1)]
    if rng.random() < 0.2 and start > 1:
        prompt, numbers = f"Count down from {numbers[-1]} to {numbers[0]}.", numbers[::-1]
    else:
        begin = f"from {numbers[0]} " if start > 1 or rng.random() < 0.5 else ""
        prompt = f"Count {begin}to {numbers[-1]}."
    return Example("count", (ask(rng, prompt), capital(", ".join(numbers)) + "."))


def days_and_months(rng: Random) -> Example:
    names, what = rng.choice(((DAYS, "days of the week"), (MONTHS, "months of the year")))
    if rng.random() < 0.25:
        order = f"{rng.choice(('name', 'list', 'tell me'))} the {what} backwards"
        return Example("list", (ask(rng, request(rng, order)), f"{join(names[::-1])}."))
    lead = rng.choice((f"The {what} are ", ""))
    order = rng.choice((f"name the {what}", f"list the {what}", f"tell me the {what}"))
    return Example("list", (ask(rng, request(rng, order)), f"{lead}{join(names)}."))


def listing(rng: Random) -> Example:
    """`Name five animals.`, with as many as asked, as a line or as a list."""
    category = rng.choice(tuple(things.CATEGORIES))
    members = things.CATEGORIES[category]
    count = rng.randint(2, min(7, len(members)))
    chosen = rng.sample(members, count)
    how = number(count) if rng.random() < 0.7 else str(count)
    orders = (
        "name {} {}",
        "list {} {}",
        "give me {} {}",
        "tell me {} {}",
        "write down {} {}",
        "think of {} {}",
    )
    order = rng.choice((*orders, "give me a list of {} {}", "make a list of {} {}", "name me {} {}"))
    style = rng.choice(("line", "line", "numbers", "bullets"))
    tail = {
        "line": "",
        "numbers": rng.choice((" as a numbered list", "")),
        "bullets": rng.choice((" as a list", "")),
    }
    prompt = request(rng, order.format(how, category) + tail[style])
    if style == "line":
        lead = rng.choice(("", "", f"{capital(number(count))} {category} are "))
        answer = capital(lead + join(chosen)) + "."
    elif style == "numbers":
        answer = "\n".join(f"{i}. {capital(item)}" for i, item in enumerate(chosen, 1))
    else:
        answer = "\n".join(f"- {capital(item)}" for item in chosen)
    return Example("list", (ask(rng, prompt), answer), (how,))


def either(rng: Random) -> Example:
    """`Is an owl an animal?`, `Is a spoon an animal?`"""
    animal, thing = rng.choice(lexicon.ANIMALS).noun, rng.choice(things.THING_NOUNS)
    if rng.random() < 0.4:
        legs = rng.choice(lexicon.ANIMALS)
        count = pick_other(rng, (2, 4, 6, 8), legs.legs) if rng.random() < 0.5 else legs.legs
        yes = count == legs.legs
        truth = f"{number(legs.legs) if legs.legs else 'no'} legs"
        start = "Yes" if yes else "No"
        question = f"Does {a(legs.noun)} have {number(count) if count else 'no'} legs?"
        return answered(rng, question, start, f"{start}, {a(legs.noun)} has {truth}", (legs.noun,))
    if rng.random() < 0.5:
        return answered(rng, f"Is {a(animal)} an animal?", "Yes", f"Yes, {a(animal)} is an animal", (animal,))
    return answered(
        rng,
        f"Is {a(thing)} an animal?",
        "No",
        f"No, {a(thing)} is not an animal. It is {things.THINGS[thing]}",
        (thing,),
    )
