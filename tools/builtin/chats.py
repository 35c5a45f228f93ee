"""Chats of several turns, in which later questions refer to what was said before."""

from collections.abc import Callable
from random import Random

from tools.builtin import explain, facts, lexicon, smalltalk, stories, things, unknown, writing
from tools.builtin.cast import Cast, draw_cast
from tools.builtin.examples import Example, ask
from tools.builtin.grammar import a, capital, number, plural

_SINGLE: tuple[Callable[[Random], Example], ...] = (
    facts.fact,
    facts.opposite,
    facts.capital_city,
    facts.animal_fact,
    facts.arithmetic,
    facts.listing,
    explain.why,
    explain.serving,
    explain.how_to,
    explain.job,
    smalltalk.joke,
    unknown.unknown,
    stories.story,
    writing.poem,
)


def _unrelated(rng: Random) -> list[str]:
    """Two or three questions one after the other, each answered by itself."""
    turns: list[str] = []
    for _ in range(rng.choice((2, 2, 3))):
        turns += rng.choice(_SINGLE)(rng).turns
    return turns


def _animal(rng: Random) -> list[str]:
    """Questions about one animal, later ones with `it`."""
    animal = rng.choice(lexicon.ANIMALS)
    one = a(animal.noun)
    first = rng.choice(
        (
            (f"What is {one}?", f"{capital(one)} is an animal that lives {animal.home}."),
            (f"Tell me about {plural(animal.noun)}.", f"{capital(plural(animal.noun))} have {animal.body}."),
            (f"Do you know {plural(animal.noun)}?", f"Yes! {capital(one)} can {animal.can}."),
        )
    )
    legs = f"It has {number(animal.legs)} legs." if animal.legs else "It has no legs."
    follow = [
        ("Where does it live?", f"It lives {animal.home}."),
        (rng.choice(("What does it eat?", "And what does it eat?")), f"It eats {animal.food}."),
        ("How many legs does it have?", legs),
        ("What is its baby called?", f"{capital(a(animal.young))}."),
        ("What can it do?", f"It can {animal.can}."),
    ]
    if animal.says:
        follow.append(
            (rng.choice(("What sound does it make?", "What does it say?")), f"{capital(animal.says)}!")
        )
    turns = [ask(rng, first[0]), first[1]]
    for question, answer in rng.sample(follow, rng.choice((1, 2, 2, 3))):
        turns += [ask(rng, question), answer]
    return turns


def _about_the_story(rng: Random, cast: Cast, text: str) -> tuple[str, str]:
    """A question about a story that was just told, answered from its cast."""
    pairs = [
        ("Where does the story take place?", f"It takes place {cast.place.inside}."),
        ("Who is the story about?", f"It is about {cast.hero.introduced}."),
    ]
    if cast.hero.name:
        pairs.append(
            (f"What kind of creature is {cast.hero.name}?", f"{cast.hero.name} is {a(cast.hero.kind)}.")
        )
        pairs.append(("What is the name of the hero?", f"The name of the hero is {cast.hero.name}."))
    if cast.friend.called in text:
        pairs.append(("Who is the friend in the story?", f"The friend is {cast.friend.introduced}."))
    question, answer = rng.choice(pairs)
    return ask(rng, question), answer


def _story(rng: Random) -> list[str]:
    cast, size = draw_cast(rng), rng.choice(stories.SIZES[:3])
    text = stories.tell(rng, cast, rng.choice(tuple(stories.PLOTS)), size)
    turns = [ask(rng, f"Tell me a story about {a(cast.hero.kind)}."), text]
    turns += _about_the_story(rng, cast, text)
    if rng.random() < 0.4:
        turns += [rng.choice(("Thank you!", "Nice story!", "I like that story.")), rng.choice(_THANKS)]
    elif rng.random() < 0.5:
        again = stories.tell(rng, draw_cast(rng), rng.choice(tuple(stories.PLOTS)), "short")
        turns += [rng.choice(("Tell me another one.", "Another story, please.", "One more!")), again]
    return turns


_THANKS = ("You are welcome!", "I am glad that you liked it.", "Thank you! Would you like another one?")


def _explained(rng: Random) -> list[str]:
    """A short answer first, then `tell me more`."""
    topics = rng.choice((explain.TOPICS, explain.TOPICS, explain.SERVING))
    topic = topics[rng.choice(tuple(topics))]
    steps = " ".join(explain.variant(rng, line) for line in topic["more"])
    more = rng.choice(
        ("Tell me more.", "Can you explain that?", "How does that work?", "Please explain in detail.", "Why?")
    )
    turns = [ask(rng, rng.choice(topic["ask"])), explain.variant(rng, topic["one"][0]), ask(rng, more), steps]
    if rng.random() < 0.3:
        turns += [
            rng.choice(("Thanks!", "Thank you!", "Now I understand.")),
            rng.choice(("You are welcome!", "I am glad!")),
        ]
    return turns


def _named(rng: Random) -> list[str]:
    """The user says their name and later asks for it."""
    start = smalltalk.introduction(rng)
    name = start.subjects[0]
    middle = (
        rng.choice((facts.fact, facts.animal_fact, smalltalk.joke))(rng).turns if rng.random() < 0.5 else ()
    )
    asked = rng.choice(("What is my name?", "Do you remember my name?", "Who am I?"))
    answer = rng.choice((f"Your name is {name}.", f"You are {name}.", f"Your name is {name}, of course!"))
    return [*start.turns, *middle, asked, answer]


def _liked_thing(rng: Random) -> list[str]:
    """The user mentions a thing, which comes back."""
    thing = f"{rng.choice(things.THING_WORDS)} {rng.choice(things.THING_NOUNS)}"
    said = rng.choice(("I have {}.", "Today I got {}.", "I found {}.", "My friend gave me {}.")).format(
        a(thing)
    )
    first = rng.choice(
        ("How nice! I like the idea of {}.", "Oh, {}! What will you do with it?", "{}? That is wonderful!")
    )
    asked = rng.choice(("Do you remember what I told you?", "What was it?"))
    return [said, capital(first.format(a(thing))), asked, f"You told me about {a(thing)}."]


def chat(rng: Random) -> Example:
    make = rng.choice(
        (_unrelated, _unrelated, _animal, _animal, _story, _explained, _explained, _named, _liked_thing)
    )
    return Example("chat", tuple(make(rng)))
