"""One training document: a chat of user and assistant turns, or plain text, and how it is written down."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

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
    prompt names and the answer must take up: combinations of them are held out for validation.
    """

    kind: str
    turns: tuple[str, ...]
    subjects: tuple[str, ...] = ()
    plain: bool = False
    system: str = ""

    @property
    def prompt(self) -> str:
        """What comes before the (last) answer, as the model sees it."""
        if self.plain:
            return ""
        return _chat(self.turns[:-1], self.system) + f"{IM_START}assistant\n"

    @property
    def text(self) -> str:
        """The whole document, as the model sees it, up to and including its end."""
        if self.plain:
            return self.turns[0] + END_OF_TEXT
        return _chat(self.turns, self.system) + END_OF_TEXT


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
