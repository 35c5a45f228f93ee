"""Stories: a plot told for a cast at a chosen length, and the prompts that ask for one."""

from dataclasses import replace
from random import Random

from tools.builtin import lexicon
from tools.builtin.cast import Cast, draw_cast, invented_name, words
from tools.builtin.examples import Example, ask, request
from tools.builtin.grammar import a, number, say
from tools.builtin.tables import sections
from tools.builtin.things import HOMES, PLACES

PLOTS = sections("plots")
FRAME = sections("frames")["story"]
THEMES = sorted({theme for plot in PLOTS.values() for theme in plot["theme"]})
SIZES = ("tiny", "short", "medium", "long")
_SIZE_WORDS = {
    "tiny": ("very short", "tiny", "very, very short"),
    "short": ("short", "little", "short"),
    "medium": ("", "", "", "nice"),
    "long": ("long", "longer", "long and detailed"),
}
# The plots in which the thing is the center; in others it is mentioned.
_OF_A_THING = ("lost", "broken", "found")
# The plots that introduce the friend themselves.
_MEETS_THE_FRIEND = ("neighbor", "found")
# The plots that make no sense without their conversation, however short the story.
_NEEDS_THE_TALK = (*_MEETS_THE_FRIEND, "storm")


class _Told:
    """The templates of one plot, each used at most once in a story."""

    def __init__(self, rng: Random, plot: str, cast: Cast) -> None:
        self._rng = rng
        self._plot = PLOTS[plot]
        self._words = words(rng, cast)
        self.opening = "open" if cast.place in HOMES else "visit"
        self.friend_is_new = plot in _MEETS_THE_FRIEND
        self.needs_talk = plot in _NEEDS_THE_TALK
        self._words["moral"] = say(rng, self._plot["moral"], self._words)

    def step(self, key: str, count: int = 1) -> str:
        """`count` different sentences of the plot's step."""
        options = self._plot[key]
        # In the order of the table, which is the order in which things happen.
        places = sorted(self._rng.sample(range(len(options)), min(count, len(options))))
        # A bar separates ways to say the same, of which a story has only one.
        return " ".join(say(self._rng, options[place].split(" | "), self._words) for place in places)

    def frame(self, key: str) -> str:
        """A sentence that fits any plot, unless this one has its own."""
        return say(self._rng, self._plot.get(key) or FRAME[key], self._words)

    def friend(self) -> str:
        """Introduces the friend, unless the plot itself does."""
        return "" if self.friend_is_new else self.frame("friend")

    def maybe(self, key: str, chance: float) -> str:
        return self.frame(key) if self._rng.random() < chance else ""


def tell(rng: Random, cast: Cast, plot: str, size: str, thing: bool = False, moral: bool = False) -> str:
    """The story as text. With `thing` its thing is sure to be mentioned."""
    told = _Told(rng, plot, cast)
    paragraphs = _paragraphs(rng, told, size, moral)
    text = "\n\n".join(" ".join(part for part in paragraph if part) for paragraph in paragraphs)
    if thing and f" {cast.noun}" not in text:
        first, _, rest = text.partition("\n\n")
        opening, _, tail = first.partition(". ")
        # In a story of one paragraph the thing comes right after the hero, and not after the end.
        first = f"{first} {told.frame('thing')}" if rest else f"{opening}. {told.frame('thing')} {tail}"
        text = first + ("\n\n" + rest if rest else "")
        text = f"{text} {told.frame('thing_end')}" if size != "tiny" else text
    return text


def _paragraphs(rng: Random, told: _Told, size: str, moral: bool) -> list[list[str]]:
    ending = told.frame("moral") if moral or rng.random() < 0.3 else told.maybe("close", 0.35)
    if size == "tiny":
        start = [told.frame(told.opening), told.friend(), told.step("begin"), told.step("problem")]
        meeting = told.step("talk") if told.needs_talk else ""
        return [[*start, meeting, told.step("turn"), told.step("solve"), ending if moral else ""]]
    if size == "short":
        first = [told.frame(told.opening), told.friend(), told.step("begin"), told.step("problem")]
        second = [
            told.step("try"),
            told.step("talk"),
            told.step("turn"),
            told.step("solve"),
            told.step("end"),
            ending,
        ]
        return [first + second] if rng.random() < 0.5 else [first, second]
    if size == "medium":
        return [
            [told.frame(told.opening), told.maybe("setting", 0.5), told.friend(), told.step("begin")],
            [told.step("problem"), told.maybe("feel", 0.7), told.step("try", rng.choice((2, 3)))],
            [told.step("talk"), told.step("turn"), told.step("solve"), told.maybe("joy", 0.5)],
            [told.step("end"), ending],
        ]
    return [
        [told.frame(told.opening), told.frame("setting"), told.frame("nature")],
        [told.friend(), told.step("begin"), told.step("problem"), told.frame("feel")],
        [told.step("try", rng.choice((4, 5, 6)))],
        [told.step("talk"), told.step("turn"), told.step("solve"), told.frame("joy")],
        [told.step("end", rng.choice((1, 2))), told.maybe("close", 0.6), told.frame("moral")],
    ]


def _size(rng: Random) -> str:
    return rng.choices(SIZES, (2, 4, 4, 3))[0]


def _sized(rng: Random, size: str, marked: bool) -> str:
    """`short story`, `story`, ...: the size is said when the length of the answer should follow it."""
    word = rng.choice(_SIZE_WORDS[size]) if marked else ""
    kind = rng.choice(("story", "story", "story", "tale"))
    return f"{word} {kind}".strip()


def _subject(rng: Random, cast: Cast) -> tuple[str, tuple[str, ...], Cast]:
    """What the prompt says the story is about, those words, and the cast that fits what was said."""
    hero, friend = cast.hero, cast.friend
    roll = rng.random()
    if roll < 0.22:
        bare = replace(hero, name="") if hero.kind not in ("girl", "boy") and rng.random() < 0.5 else hero
        return f"{a(hero.kind)} and {a(cast.noun)}", (hero.kind, cast.noun), replace(cast, hero=bare)
    if roll < 0.42:
        return f"{a(hero.kind)} and {a(friend.kind)}", (hero.kind, friend.kind), cast
    if roll < 0.55:
        named = hero if hero.name else replace(hero, name=invented_name(rng))
        other = friend if friend.name else replace(friend, name=rng.choice(lexicon.GIRLS), female=True)
        if other.name == named.name:
            other = replace(other, name=other.name + "o")
        return (
            f"{named.name} and {other.name}",
            (named.name, other.name),
            replace(cast, hero=named, friend=other),
        )
    if roll < 0.68:
        named = hero if hero.name else replace(hero, name=invented_name(rng))
        return f"{a(named.kind)} named {named.name}", (named.kind, named.name), replace(cast, hero=named)
    if roll < 0.80:
        word = cast.word if rng.random() < 0.5 else ""
        thing = f"{word} {cast.noun}".strip()
        return (
            f"{a(hero.introduced.split(' named ')[0].split(' ', 1)[1])} and {a(thing)}",
            (
                hero.kind,
                cast.noun,
            ),
            replace(cast, word=word),
        )
    if roll < 0.86:
        three = (hero.kind, friend.kind, cast.noun)
        return f"{a(hero.kind)}, {a(friend.kind)} and {a(cast.noun)}", three, cast
    if roll < 0.94:
        place = rng.choice(PLACES)
        return f"{a(hero.kind)} {place.inside}", (hero.kind, place.noun), replace(cast, place=place)
    return a(hero.kind), (hero.kind,), cast


def story(rng: Random) -> Example:
    """`Write a short story about a fox and a lantern.`"""
    cast, size, marked = draw_cast(rng), _size(rng), rng.random() < 0.7
    about, subjects, cast = _subject(rng, cast)
    thing = cast.noun in subjects
    plot = rng.choice(_OF_A_THING if thing and rng.random() < 0.6 else tuple(PLOTS))
    order = (
        f"{rng.choice(('write', 'tell', 'tell me', 'write me', 'make up'))} {a(_sized(rng, size, marked))}"
    )
    prompt = request(rng, f"{order} about {about}")
    if rng.random() < 0.1:
        prompt = f"{_sized(rng, size, marked).capitalize()} about {about}."
    return Example("story", (ask(rng, prompt), tell(rng, cast, plot, size, thing)), subjects)


def theme_story(rng: Random) -> Example:
    """`Tell me a story about courage.`"""
    theme = rng.choice(THEMES)
    plot = rng.choice([name for name, parts in PLOTS.items() if theme in parts["theme"]])
    size, cast = _size(rng), draw_cast(rng)
    order = f"{rng.choice(('write', 'tell me', 'tell'))} {a(_sized(rng, size, True))}"
    prompt = rng.choice((f"{order} about {theme}", f"{order} with a moral about {theme}"))
    text = tell(rng, cast, plot, size, moral=True)
    lead = rng.choice(("", "", f"Here is a story about {theme}.\n\n"))
    return Example("story", (ask(rng, request(rng, prompt)), lead + text), (theme,))


def free_story(rng: Random) -> Example:
    """`Tell me a story.`"""
    size = _size(rng)
    prompts = ("tell me {}", "write {}", "tell me {} for bedtime", "tell me {} for children", "make up {}")
    prompt = rng.choice(prompts).format(a(_sized(rng, size, rng.random() < 0.6)))
    text = tell(rng, draw_cast(rng), rng.choice(tuple(PLOTS)), size)
    return Example("story", (ask(rng, request(rng, prompt)), text))


def chapters(rng: Random) -> Example:
    """`Write a very long story about a fox.`: several plots with the same cast, the longest answers of all."""
    cast, count = draw_cast(rng), rng.choice((2, 2, 3))
    asked = rng.choice(
        ("a very long story", f"a story in {number(count)} chapters", f"{number(count)} chapters")
    )
    order = f"{rng.choice(('write', 'tell me'))} {asked} about {a(cast.hero.kind)} and {a(cast.friend.kind)}"
    plots = rng.sample([name for name in PLOTS if name not in _MEETS_THE_FRIEND], count)
    parts = []
    for index, plot in enumerate(plots):
        text = retold(rng, cast, plot) if index else tell(rng, cast, plot, "medium")
        parts.append(f"Chapter {index + 1}\n\n{text}")
    return Example(
        "story", (ask(rng, request(rng, order)), "\n\n".join(parts)), (cast.hero.kind, cast.friend.kind)
    )


def retold(rng: Random, cast: Cast, plot: str) -> str:
    """A later story of a cast that the reader already knows."""
    told = _Told(rng, plot, cast)
    paragraphs = (
        [told.frame("later"), told.step("begin"), told.step("problem"), told.maybe("feel", 0.6)],
        [told.step("try", rng.choice((2, 3))), told.step("talk")],
        [told.step("turn"), told.step("solve"), told.maybe("joy", 0.5), told.step("end")],
    )
    return "\n\n".join(" ".join(part for part in paragraph if part) for paragraph in paragraphs)


def continued_story(rng: Random) -> Example:
    """`Continue the story: ...`: the prompt holds the first sentences, the answer the rest."""
    cast = draw_cast(rng)
    text = tell(rng, cast, rng.choice(tuple(PLOTS)), rng.choice(SIZES[1:]))
    begin, rest = split_story(rng, text)
    lead = rng.choice(
        (
            "",
            "",
            "Continue the story: ",
            "Continue this story: ",
            "Finish this story: ",
            "How does this story go on? ",
            "What happens next? ",
            "Go on with this story: ",
            "Please continue: ",
        )
    )
    return Example("continue", (lead + begin, rest), (cast.hero.called, cast.friend.called))


def split_story(rng: Random, text: str) -> tuple[str, str]:
    """The first one to four sentences of a text and what follows."""
    ends = [
        i + 1
        for i in range(len(text) - 2)
        if text[i] in ".!?" and text[i + 1] in " \n" and text[i + 2] != '"'
    ]
    quotes = [end for end in ends if text[:end].count('"') % 2 == 0]
    cut = rng.choice(quotes[:4])
    return text[:cut], text[cut:].strip()


def plain_story(rng: Random) -> Example:
    """A story without chat markup, for plain text completion."""
    text = tell(rng, draw_cast(rng), rng.choice(tuple(PLOTS)), _size(rng))
    return Example("plain", (text,), plain=True)


def story_of_thing(rng: Random) -> Example:
    """`Write a story about Mia, who lost her red kite.`"""
    cast = draw_cast(rng)
    if not cast.hero.name:
        cast = replace(
            cast,
            hero=replace(cast.hero, name=rng.choice(lexicon.GIRLS if cast.hero.female else lexicon.BOYS)),
        )
    if cast.friend.name == cast.hero.name:
        cast = replace(cast, friend=replace(cast.friend, name=""))
    hero, his = cast.hero, "her" if cast.hero.female else "his"
    he, who = "she" if hero.female else "he", rng.choice(("who", "who", "that"))
    size = _size(rng)
    about, plot = rng.choice(
        (
            (f"{hero.name}, who lost {his} {cast.noun}", "lost"),
            (f"{a(hero.kind)} named {hero.name} who lost {his} {cast.noun}", "lost"),
            (f"{hero.name}, who found {a(cast.noun)}", "found"),
            (f"{a(hero.kind)} named {hero.name} who broke {a(cast.noun)}", "broken"),
            (f"{hero.name}, who wanted to {cast.skill}", "skill"),
            (f"{hero.name} and the day when {he} learned to {cast.skill}", "skill"),
            (f"{hero.name} and a great storm", "storm"),
            (f"{hero.name}, who was afraid of the dark", "dark"),
            (f"{hero.name} and {his} birthday", "surprise"),
            (f"{hero.name} and a big race", "race"),
            (f"{a(hero.kind)} who lost {his} {cast.noun}", "lost"),
            (f"{a(hero.kind)} who found {a(cast.noun)}", "found"),
            (f"{a(hero.kind)} who wanted to {cast.skill}", "skill"),
            (f"{a(hero.kind)} who was afraid of the dark", "dark"),
            (f"{a(hero.kind)} {who} finds {a(cast.noun)}", "found"),
            (f"{a(hero.kind)} {who} loses {his} {cast.noun}", "lost"),
            (f"{a(hero.kind)} {who} learns to {cast.skill}", "skill"),
            (f"{a(hero.kind)} named {hero.name} {who} finds {a(cast.noun)}", "found"),
            (f"{a(hero.kind)} named {hero.name} {who} wants to {cast.skill}", "skill"),
        )
    )
    order = (
        f"{rng.choice(('write', 'tell me', 'tell'))} {a(_sized(rng, size, rng.random() < 0.6))} about {about}"
    )
    center = {"skill": cast.skill, "storm": "storm", "dark": "dark", "surprise": "birthday", "race": "race"}
    subjects = (hero.name if hero.name in about else hero.kind, center.get(plot, cast.noun))
    return Example("story", (ask(rng, request(rng, order)), tell(rng, cast, plot, size)), subjects)
