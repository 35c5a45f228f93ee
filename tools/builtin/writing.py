"""Texts on demand: letters, dialogues, descriptions, poems and diary pages."""

from random import Random

from tools.builtin import lexicon, things
from tools.builtin.cast import SEASONS, draw_kind, draw_thing, name_for
from tools.builtin.examples import Example, ask, request
from tools.builtin.grammar import a, capital, join, plural, say
from tools.builtin.tables import sections

LETTERS = sections("letters")
DIALOGUES = sections("dialogues")
POEMS = sections("poems")
SCENES = sections("scenes")


_RELATIVES = (
    "grandmother",
    "grandfather",
    "mother",
    "father",
    "teacher",
    "neighbor",
    "aunt",
    "uncle",
    "sister",
)


def _two_names(rng: Random) -> tuple[str, str]:
    first = name_for(rng, rng.random() < 0.5)
    second = name_for(rng, rng.random() < 0.5)
    return (first, second) if first != second else _two_names(rng)


def _words(rng: Random) -> dict[str, str]:
    """The words of letters, dialogues and poems."""
    x, y = _two_names(rng)
    place, noun = rng.choice(things.PLACES), rng.choice(things.THING_NOUNS)
    thing = f"{rng.choice(things.THING_WORDS)} {noun}"
    season = rng.choice(tuple(SEASONS))
    animal = rng.choice(lexicon.ANIMALS)
    return {
        "x": x,
        "y": y,
        "place": place.the,
        "in_place": place.inside,
        "sight": rng.choice(place.sights),
        "sound": rng.choice(place.sounds),
        "noun": noun,
        "thing": thing,
        "a_thing": a(thing),
        "food": rng.choice(things.FOODS),
        "day": rng.choice(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")),
        "hour": rng.choice(("two", "three", "four", "five", "six", "seven")),
        "season": season,
        "animal": animal.noun,
        "an_animal": a(animal.noun),
        "home": animal.home,
        "food_of": animal.food,
    }


def letter(rng: Random) -> Example:
    """`Write a letter from Mia to Tom to say thank you for a kite.`"""
    words, kind = _words(rng), LETTERS[rng.choice(tuple(LETTERS))]
    form = rng.choice(("letter", "short letter", "letter", "note", "long letter"))
    relative = rng.choice(_RELATIVES)
    if rng.random() < 0.15:
        words["y"] = relative
    to = words["y"] if words["y"] != relative else f"my {relative}"
    to = f"my friend {to}" if to != f"my {relative}" and rng.random() < 0.25 else to
    who = rng.choice((f"from {words['x']} to {to}", f"to {to} from {words['x']}", f"to {to}", f"to {to}"))
    reason = rng.choice(kind["why"]).format_map(words | {"y": to})
    if rng.random() < 0.2:
        reason = ""  # then any kind of letter will do
    prompt = request(rng, f"write {rng.choice(('', '', 'me '))}{a(form)} {who} {reason}".strip())
    count = {"note": 1, "short letter": 1, "letter": 2, "long letter": 4}[form]
    places = sorted(rng.sample(range(len(kind["more"])), min(count, len(kind["more"]))))
    body = " ".join([say(rng, kind["first"], words), *(say(rng, (kind["more"][i],), words) for i in places)])
    closing = rng.choice(("Best wishes", "Yours", "With love", "See you soon", "Warm regards"))
    # Without a sender in the prompt the letter is signed by a friend.
    sender = words["x"] if words["x"] in who else "Your friend"
    answer = f"Dear {words['y']},\n\n{body}\n\n{closing},\n{sender}"
    return Example(
        "letter",
        (ask(rng, prompt), answer),
        (words["y"], words["noun"] if words["noun"] in reason else reason or form),
    )


def dialogue(rng: Random) -> Example:
    """`Write a dialogue between Mia and Tom about the weather.`"""
    words = _words(rng)
    between = words["x"], words["y"]
    if rng.random() < 0.25:
        kinds = rng.sample((*(one.noun for one in lexicon.ANIMALS), *lexicon.CREATURES), 2)
        between = a(kinds[0]), a(kinds[1])
        words |= {"x": capital(kinds[0]), "y": capital(kinds[1])}
    topic = rng.choice(tuple(DIALOGUES))
    parts = DIALOGUES[topic]
    order = rng.choice(
        (
            "write a dialogue between {x} and {y} about {t}",
            "write a conversation between {x} and {y} about {t}",
            "let {x} and {y} talk about {t}",
            "write a short dialogue between {x} and {y} about {t}",
        )
    ).format(x=between[0], y=between[1], t=parts["about"][0].format_map(words))
    # The openings and their replies belong together, and so do the last two lines.
    first, last = rng.randrange(len(parts["open"])), rng.randrange(len(parts["close"]))
    lines = [parts[key][first].format_map(words) for key in ("open", "reply")]
    middle = len(parts["middle"]) // 2
    for index in range(0 if "short" in order else rng.randint(1, middle)):
        lines += [line.format_map(words) for line in parts["middle"][2 * index : 2 * index + 2]]
    lines += [parts[key][last].format_map(words) for key in ("close", "bye")]
    answer = "\n".join(
        f"{words['x'] if i % 2 == 0 else words['y']}: {capital(line)}" for i, line in enumerate(lines)
    )
    return Example("dialogue", (ask(rng, request(rng, order)), answer), (words["x"], words["y"]))


def description(rng: Random) -> Example:
    """`Describe a forest.`: what one sees, hears and smells there."""
    place = rng.choice(things.PLACES)
    order = rng.choice(
        (
            "describe {}",
            "describe {} in a few sentences",
            "write a description of {}",
            "tell me what {} is like",
            "describe {} in detail",
            "describe {} in one sentence",
        )
    )
    prompt = request(rng, order.format(a(place.noun)))
    here = capital(place.inside)
    sights, sounds = list(place.sights), list(place.sounds)
    rng.shuffle(sights)
    rng.shuffle(sounds)
    if "one sentence" in order:
        answer = rng.choice(
            (
                f"{here}, you see {sights[0]} and hear {sounds[0]}.",
                f"{here} there is a smell of {place.smell}.",
            )
        )
        return Example("describe", (ask(rng, prompt), answer), (place.noun,))
    parts = [
        rng.choice(
            (f"{here}, you can see {join(sights[:2])}.", f"{here}, the first thing you see is {sights[0]}.")
        ),
        rng.choice((f"You can hear {sounds[0]}.", f"If you listen, you hear {join(sounds)}.")),
        rng.choice((f"The air smells of {place.smell}.", f"There is a smell of {place.smell}.")),
        say(rng, SCENES["place"]["time"], {}),
        say(rng, SCENES["place"]["feel"], {}),
    ]
    if "detail" in order:
        extra = [f"You can also find {sights[-1]}.", say(rng, SCENES["place"]["more"], {})]
        answer = f"{' '.join(parts[:3])}\n\n{' '.join(extra + parts[3:])}"
    else:
        answer = " ".join(parts[: rng.randint(2, 5)])
    return Example("describe", (ask(rng, prompt), answer), (place.noun,))


def season(rng: Random) -> Example:
    """`Describe winter.`, `What do you like about spring?`"""
    name = rng.choice(tuple(SEASONS))
    lines = SCENES[name]["line"]
    order = rng.choice((f"describe {name}", f"tell me about {name}", f"write a few sentences about {name}"))
    prompt = rng.choice((request(rng, order), f"What is {name} like?", f"What happens in {name}?"))
    chosen = sorted(rng.sample(range(len(lines)), rng.randint(2, len(lines))))
    return Example("describe", (ask(rng, prompt), " ".join(lines[i] for i in chosen)), (name,))


_ALSO_CALLED = {
    "a friend": ("a friend", "friendship", "my best friend"),
    "the sea": ("the sea", "the ocean"),
    "the night": ("the night", "nighttime"),
    "a cat": ("a cat", "my cat", "cats"),
    "a dog": ("a dog", "my dog", "dogs"),
    "rain": ("rain", "the rain"),
    "autumn": ("autumn", "fall"),
}


def _poem_subject(rng: Random) -> tuple[str, tuple[str, ...]]:
    """What a poem is about, and its verses: written for it, or fitting any creature or any thing."""
    if rng.random() < 0.4:
        subject = rng.choice([name for name in POEMS if not name.startswith("any ")])
        return rng.choice(_ALSO_CALLED.get(subject, (subject,))), POEMS[subject]["verse"]
    if rng.random() < 0.6:
        noun, verses = draw_kind(rng), POEMS["any creature"]["verse"]
        own = rng.choice((noun, f"{rng.choice(lexicon.CHARACTER_WORDS)} {noun}"))
    else:
        noun, verses = draw_thing(rng), POEMS["any thing"]["verse"]
        own = rng.choice((noun, f"{rng.choice(things.THING_WORDS)} {noun}"))
    words = {"noun": noun, "one": a(own), "One": capital(a(own)), "Plural": capital(plural(noun))}
    return rng.choice((a(own), a(own), plural(own))), tuple(verse.format_map(words) for verse in verses)


def poem(rng: Random) -> Example:
    """`Write a poem about the moon.`: verses of four lines, the second and the fourth rhyming."""
    subject, verses = _poem_subject(rng)
    short = rng.random() < 0.4
    order = rng.choice(("write {} about {}", "write me {} about {}", "make {} about {}"))
    kind = "a short poem" if short else rng.choice(("a poem", "a poem", "a rhyme"))
    chosen = sorted(rng.sample(range(len(verses)), 1 if short else rng.randint(1, min(3, len(verses)))))
    text = "\n\n".join(verses[i].replace(" / ", "\n") for i in chosen)
    return Example("poem", (ask(rng, request(rng, order.format(kind, subject))), text), (subject,))


def diary(rng: Random) -> Example:
    """`Write a diary entry of a fox.`"""
    words = _words(rng)
    who = rng.choice((words["animal"], rng.choice(lexicon.JOBS).noun, rng.choice(lexicon.CREATURES)))
    prompt = request(
        rng, rng.choice(("write a diary entry of {}", "write a page from the diary of {}")).format(a(who))
    )
    scene = SCENES["diary"]
    words |= {"who": who, "who_phrase": a(who)}
    parts = [say(rng, scene[key], words) for key in ("wake", "noon", "event")]
    if rng.random() < 0.7:
        parts.append(say(rng, scene["thought"], words))
    parts.append(say(rng, scene["night"], words))
    return Example("diary", (ask(rng, prompt), f"Dear diary,\n\n{' '.join(parts)}"), (who,))
