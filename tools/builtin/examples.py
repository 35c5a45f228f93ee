"""One training document: a chat of user and assistant turns, or plain text, and how it is written down."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tools.builtin.chat_format import END_OF_TEXT, IM_END, IM_START, THINK, THOUGHT, Segment

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a small model that tells stories and answers simple questions.",
    "Answer clearly and kindly.",
    "You are a helpful assistant who answers in simple words.",
)


@dataclass(frozen=True, slots=True)
class Example:
    """A document of the corpus.

    `turns` alternate user, assistant, user, ...; a plain text has one turn. `subjects` are the words that the
    prompt names and the answer must take up: combinations of them are held out for validation. With a `thought`, the
    prompt of the last answer asks for thinking.
    """

    kind: str
    turns: tuple[str, ...]
    subjects: tuple[str, ...] = ()
    plain: bool = False
    system: str = ""
    thought: str = ""

    @property
    def prompt(self) -> str:
        """What comes before the (last) answer, as the model sees it."""
        if self.plain:
            return ""
        begun = f"{IM_START}assistant\n" + (THINK if self.thought else "")
        return _chat(self.turns[:-1], self.system) + begun

    @property
    def text(self) -> str:
        """The whole document, as the model sees it, up to and including its end."""
        return "".join(segment.text for segment in self.segments)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The document in pieces: all of it is learned, but not to begin with a thought unasked."""
        if self.plain:
            return (Segment(self.turns[0] + END_OF_TEXT, True),)
        if not self.thought:
            return (Segment(_chat(self.turns, self.system) + END_OF_TEXT, True),)
        written = f"{self.thought}{THOUGHT}{self.turns[-1]}{IM_END}\n{END_OF_TEXT}"
        prompt = self.prompt.removesuffix(THINK)
        return Segment(prompt, True), Segment(THINK, False), Segment(written, True)


def _chat(turns: Sequence[str], system: str) -> str:
    lines = [f"{IM_START}system\n{system}{IM_END}\n"] if system else []
    for index, turn in enumerate(turns):
        role = "assistant" if index % 2 else "user"
        lines.append(f"{IM_START}{role}\n{turn}{IM_END}\n")
    return "".join(lines)


_AFTER = (" Thank you.", " Thanks!", " please")
_BEFORE = (
    "Hi! ",
    "Hello! ",
    "Hey, ",
    "Okay. ",
    "One question: ",
    "Quick question: ",
    "Tell me: ",
    "Hmm. ",
    "So, ",
)
_SHORTENED = (
    ("I am ", "I'm "),
    ("I cannot ", "I can't "),
    ("What is ", "What's "),
    ("do not ", "don't "),
    ("does not ", "doesn't "),
    ("I would ", "I'd "),
    ("Who is ", "Who's "),
    ("you are ", "you're "),
)


def ask(rng: Random, prompt: str) -> str:
    """The prompt as different people would type it: with or without capitals, punctuation and politeness."""
    if rng.random() < 0.25:
        for long, short in _SHORTENED:
            prompt = prompt.replace(long, short)
    roll = rng.random()
    bare = prompt.rstrip(".?!") or prompt
    if roll < 0.62:
        return prompt
    if roll < 0.72:
        return prompt[:1].lower() + prompt[1:]
    if roll < 0.80:
        return bare
    if roll < 0.87:
        return bare[:1].lower() + bare[1:]
    if roll < 0.92:
        return bare.lower()
    if roll < 0.96:
        return prompt + rng.choice(_AFTER[:2]) if prompt[-1:] in ".?!" else prompt + _AFTER[2]
    return rng.choice(_BEFORE) + prompt


def request(rng: Random, order: str) -> str:
    """An order (`write a letter`) as a sentence: as it is, as a question or with a please."""
    roll = rng.random()
    if roll < 0.6:
        return order[:1].upper() + order[1:] + "."
    if roll < 0.75:
        return f"Please {order}."
    if roll < 0.9:
        return f"{rng.choice(('Can you', 'Could you', 'Would you'))} {order}?"
    return f"{rng.choice(('I want you to', 'I would like you to'))} {order}."
