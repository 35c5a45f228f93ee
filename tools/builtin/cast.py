"""Who and what a story is about: characters with fixed names and pronouns, a place, a thing, and so on.

A `Cast` is drawn once a story and turned into the words of the templates, so that every sentence speaks of
the same people and things.
"""

from dataclasses import dataclass
from random import Random

from tools.builtin import lexicon, things
from tools.builtin.grammar import a, capital, pick_other

DAYTIMES = ("morning", "afternoon", "evening", "day")
WEATHERS = ("sunny", "rainy", "windy", "foggy", "warm", "cold", "snowy", "cloudy", "bright", "gray")
SEASONS = {"spring": "mild", "summer": "long and warm", "autumn": "golden", "winter": "short and cold"}
SAD = ("sad", "worried", "lonely", "unhappy", "troubled")
GLAD = ("happy", "glad", "proud", "cheerful", "relieved", "delighted")
# A character word that can also stand alone after "was".
TRAITS = (
    "brave",
    "curious",
    "kind",
    "shy",
    "clever",
    "quiet",
    "cheerful",
    "gentle",
    "careful",
    "friendly",
    "patient",
)


@dataclass(frozen=True, slots=True)
class Character:
    """Someone in a story. Without a name they are spoken of by kind: `the fox`."""

    kind: str
    name: str
    female: bool
    word: str

    @property
    def called(self) -> str:
        return self.name or f"the {self.kind}"

    @property
    def introduced(self) -> str:
        phrase = a(f"{self.word} {self.kind}" if self.word else self.kind)
        return f"{phrase} named {self.name}" if self.name else phrase


@dataclass(frozen=True, slots=True)
class Cast:
    hero: Character
    friend: Character
    helper: str  # a job
    place: things.Place
    word: str  # of the thing: "red"
    noun: str  # the thing: "kite"
    food: str
    skill: str


_REAL = tuple(
    word
    for word in (
        *lexicon.GIRLS,
        *lexicon.BOYS,
        *lexicon.OBJECT_HEROES,
        *things.OTHER_THINGS,
        *things.THING_NOUNS,
    )
    if word.isalpha()
)


def invented_word(rng: Random) -> str:
    """A word that does not exist, so that the model learns to copy words and not to know them."""
    if rng.random() < 0.5:
        # Halves of real words: they end in tokens that elsewhere go on in another way.
        first, second = rng.choice(_REAL), rng.choice(_REAL)
        return (first[: rng.randint(2, 5)] + second[-rng.randint(2, 5) :]).lower()
    syllables = rng.choice((1, 2, 2, 2, 3, 3))
    word = "".join(rng.choice(lexicon.ONSETS) + rng.choice(lexicon.VOWELS) for _ in range(syllables))
    return word + rng.choice(lexicon.CODAS if syllables > 1 else [end for end in lexicon.CODAS if end])


def invented_name(rng: Random) -> str:
    return capital(invented_word(rng))


def name_for(rng: Random, female: bool) -> str:
    if rng.random() < 0.16:
        return invented_name(rng)
    return rng.choice(lexicon.GIRLS if female else lexicon.BOYS)


def character(rng: Random, kind: str = "", named: float = 0.65) -> Character:
    """A character of this kind, or of a random one."""
    kind = kind or draw_kind(rng)
    last = kind.rpartition(" ")[2]  # of "bell queen"
    female = last in lexicon.FEMALE_KINDS or kind == "girl" or (rng.random() < 0.5)
    if last in lexicon.MALE_KINDS or kind == "boy":
        female = False
    person = kind in ("girl", "boy")
    name = name_for(rng, female) if person or rng.random() < named else ""
    word = rng.choice(lexicon.CHARACTER_WORDS[1:] if person else lexicon.CHARACTER_WORDS)
    word = word if rng.random() < 0.75 else ""
    return Character(kind, name, female, word)


def draw_kind(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.45:
        return rng.choice(lexicon.ANIMALS).noun
    if roll < 0.62:
        return rng.choice(("girl", "boy"))
    if roll < 0.74:
        return rng.choice(lexicon.CREATURES)
    if roll < 0.84:
        return rng.choice(lexicon.OBJECT_HEROES)
    if roll < 0.87:
        return invented_word(rng)
    if roll < 0.91:
        first = rng.choice(
            (*things.THING_NOUNS, *things.OTHER_THINGS, *(place.noun for place in things.PLACES))
        )
        return f"{first} {rng.choice(lexicon.DOERS)}"
    return rng.choice(lexicon.JOBS).noun


def draw_thing(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.06:
        return invented_word(rng)
    return rng.choice(things.OTHER_THINGS if roll < 0.3 else things.THING_NOUNS)


def draw_cast(rng: Random) -> Cast:
    hero = character(rng)
    friend = character(rng)
    while friend.kind == hero.kind or (friend.name and friend.name == hero.name):
        friend = character(rng)
    at_sea = hero.kind in lexicon.SEA_ANIMALS or friend.kind in lexicon.SEA_ANIMALS
    jobs = [job.noun for job in lexicon.JOBS]
    return Cast(
        hero=hero,
        friend=friend,
        helper=pick_other(rng, jobs, hero.kind, friend.kind),
        place=rng.choice(things.SEASIDE if at_sea else things.HOMES),
        word=rng.choice(things.THING_WORDS),
        noun=draw_thing(rng),
        food=rng.choice(things.FOODS),
        skill=rng.choice(things.SKILLS),
    )


def _pronouns(who: Character, prefix: str = "") -> dict[str, str]:
    he, him, his, himself = (
        ("she", "her", "her", "herself") if who.female else ("he", "him", "his", "himself")
    )
    up = prefix.upper()
    return {
        f"{prefix}he": he,
        f"{prefix}him": him,
        f"{prefix}his": his,
        f"{prefix}himself": himself,
        f"{up}He": capital(he),
        f"{up}His": capital(his),
    }


def words(rng: Random, cast: Cast) -> dict[str, str]:
    """Everything that the story templates may name."""
    place, spots = cast.place, rng.sample(cast.place.spots, 4)
    season = rng.choice(tuple(SEASONS))
    trait = pick_other(rng, TRAITS, cast.hero.word)
    helper_female = rng.random() < 0.5
    found = {
        "hero": cast.hero.called,
        "a_hero": cast.hero.introduced,
        "friend": cast.friend.called,
        "a_friend": cast.friend.introduced,
        "helper": f"the {cast.helper}",
        "helper_his": "her" if helper_female else "his",
        "helper_poss": "hers" if helper_female else "his",
        "place": place.the,
        "in_place": place.inside,
        "spot": spots[0],
        "spot2": spots[1],
        "spot3": spots[2],
        "spot4": spots[3],
        "sight": rng.choice(place.sights),
        "sound": rng.choice(place.sounds),
        "smell": place.smell,
        "thing": f"{cast.word} {cast.noun}" if cast.word else cast.noun,
        "a_thing": a(f"{cast.word} {cast.noun}" if cast.word else cast.noun),
        "noun": cast.noun,
        "food": cast.food,
        "skill": cast.skill,
        "daytime": rng.choice(DAYTIMES),
        "weather": rng.choice(WEATHERS),
        "season": season,
        "season_word": SEASONS[season],
        "trait": trait,
        "trait2": pick_other(rng, TRAITS, trait),
        "sad": rng.choice(SAD),
        "glad": rng.choice(GLAD),
    }
    for key in ("hero", "friend", "helper", "in_place"):
        found[capital(key)] = capital(found[key])
    return found | _pronouns(cast.hero) | _pronouns(cast.friend, "f")
