"""The special tokens that a tokenizer puts around a text, or a pair of texts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers

from inflight.errors import InflightError, ModelError, PromptError
from inflight.model_files import MAX_TOKENIZER_BYTES, read_file, read_object
from inflight.text import tokenizer_files as files
from inflight.text.byte_decoder import ByteDecoder


@dataclass(frozen=True, slots=True)
class TextFrame:
    """Read from the post-processor once, so that texts can be tokenized, cut and joined apart from each other:

    before, the text, after        or        before, the first text, between, the second text, after
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    between: tuple[int, ...] = ()
    # Where the second segment begins (token type 1), counted from the end of the first text; None: all are of type 0.
    second_offset: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def around(self, ids: list[int]) -> list[int]:
        return [*self.before, *ids, *self.after]

    def around_pair(self, first: list[int], second: list[int]) -> tuple[list[int], int]:
        """All ids, and where the second segment begins; 0: there is none."""
        ids = [*self.before, *first, *self.between, *second, *self.after]
        offset = self.second_offset
        return ids, 0 if offset is None else len(self.before) + len(first) + offset


def frame_of(backend: Any, pair: bool) -> TextFrame:
    """What a `tokenizers.Tokenizer` puts around a text or a pair."""
    found = backend.encode("a", "b") if pair else backend.encode("a")
    groups = [(which, list(group)) for which, group in groupby(enumerate(found.sequence_ids), lambda x: x[1])]
    texts = [which for which, _ in groups if which is not None]
    if texts != ([0, 1] if pair else [0]):
        what = "two texts" if pair else "a text"
        raise ModelError(f"this tokenizer does not put {what} together in the order given: it cannot be used")
    parts: list[list[int]] = [[]]
    for which, group in groups:
        if which is None:
            parts[-1] = [found.ids[place] for place, _ in group]
        else:
            parts.append([])
    second = found.type_ids.index(1) if pair and 1 in found.type_ids else None
    end_of_first = next(group[-1][0] + 1 for which, group in groups if which == 0)
    return TextFrame(
        before=tuple(parts[0]),
        between=tuple(parts[1]) if pair else (),
        after=tuple(parts[-1]),
        second_offset=None if second is None else second - end_of_first,
    )


class TokenizerPanicError(InflightError, RuntimeError):
    """The `tokenizers` package came upon a mistake of its own, or a tokenizer.json that makes no sense."""


@contextmanager
def no_panic() -> Iterator[None]:
    """Panics of its Rust code are no `Exception`, and would pass whoever ends one request and goes on."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerPanicError(f"the tokenizer panicked: {error}") from error


class Tokenizer:
    """A checkpoint's tokenizer. Nothing in it changes after loading, so any thread may use it."""

    def __init__(
        self,
        backend: Any,  # tokenizers.Tokenizer, which has no types
        *,
        specials: Mapping[str, str] | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        chat_template: files.ChatTemplateSource | None = None,
    ) -> None:
        self.folder: Path | None = None  # where it was loaded from
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens: dict[str, str] = dict(specials or {})
        self.chat_template = chat_template
        self.vocab_size: int = max(backend.get_vocab(True).values(), default=-1) + 1
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        # A post-processor that adds tokens knows best; the flags of the configuration speak where none does.
        silent = backend.num_special_tokens_to_add(False) == 0
        self._before = [self.bos_token_id] if silent and add_bos and self.bos_token_id is not None else []
        self._after = [self.eos_token_id] if silent and add_eos and self.eos_token_id is not None else []
        self.byte_decoder = ByteDecoder.of(backend)
        self._texts: dict[int, str] = {}  # of single tokens, as far as they were asked for
        self._plain: Any = None  # the backend that reads no special tokens in text, made when first needed
        self._unknown_id: int | None = None  # set with it
        self._lock = threading.Lock()

    @classmethod
    def load(cls, folder: Path, template: str | None = None) -> Tokenizer:
        """The tokenizer of a checkpoint's folder. `template` is a chat template, or the file of one, in place of the
        checkpoint's."""
        folder = Path(folder)
        content = read_file(folder, "tokenizer.json", MAX_TOKENIZER_BYTES)
        if content is None:
            raise ModelError(_missing(folder))
        config = read_object(folder, "tokenizer_config.json") or {}
        specials = files.special_tokens(folder, config)
        declared = files.added_tokens(folder, config)
        chosen = files.chat_template(folder, config) if template is None else files.given_template(template)
        try:
            with no_panic():
                backend = tokenizers.Tokenizer.from_buffer(content)
                _complete(backend, declared, specials)
                tokenizer = cls(
                    backend,
                    specials=specials,
                    add_bos=config.get("add_bos_token") is True,
                    add_eos=config.get("add_eos_token") is True,
                    chat_template=chosen,
                )
                tokenizer.encode("One text, to see whether it can: é 1.")
        except (
            Exception
        ) as error:  # the package raises bare Exception, and a damaged file makes ours raise others
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"{folder / 'tokenizer.json'} cannot be used: {reason}") from error
        tokenizer.folder = folder
        return tokenizer

    @cached_property
    def max_characters_per_token(self) -> int | None:
        """No token stands for more of a text; None where one may stand for any number."""
        if self.byte_decoder is None:
            return None
        longest = max(map(len, self._backend.get_vocab(True)), default=1)
        return 4 * longest  # a letter and its accents may be normalised to one character

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        With `parse_special=False` the spelling of a special token in the text is only text: a control
        token can then come from nowhere but `add_special_tokens`.
        """
        return self.encode_batch([text], add_special_tokens, parse_special=parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, parse_special: bool = True
    ) -> list[list[int]]:
        for text in texts:
            check_text(text)
        backend = self._backend if parse_special else self._plain_backend()
        # The fast variant leaves out the offsets, which cost more than the ids.
        with no_panic():
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        if not parse_special:
            for encoding in encodings:
                self._check_plain(encoding)
        if add_special_tokens and (self._before or self._after):
            return [[*self._before, *encoding.ids, *self._after] for encoding in encodings]
        return [encoding.ids for encoding in encodings]

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that are only text, whatever they spell, and nothing around them.

        A few models cannot help reading a special token where one is spelled: for them a space is put into it.
        """
        backend = self._plain_backend()
        with no_panic():
            found = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        forbidden = self.special_ids - {self._unknown_id}
        for index, ids in enumerate(found):
            if not forbidden.isdisjoint(ids):
                found[index] = self.encode(self._broken(texts[index]), False, parse_special=False)
        return found

    def _broken(self, text: str) -> str:
        for special in self.special_spellings:
            text = text.replace(special, f"{special[:1]} {special[1:]}")
        return text

    @cached_property
    def frame(self) -> TextFrame:
        """What `encode` puts around the tokens of a text."""
        if self._before or self._after:
            return TextFrame(tuple(self._before), tuple(self._after))
        with no_panic():
            return frame_of(self._backend, pair=False)

    @cached_property
    def pair_frame(self) -> TextFrame:
        """What stands around and between the tokens of two texts that are read as a pair."""
        if self._before or self._after:
            between = (*self._after, *self._before)
            return TextFrame(tuple(self._before), tuple(self._after), between)
        with no_panic():
            return frame_of(self._backend, pair=True)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids that the tokenizer does not know have no text."""
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        if self.byte_decoder is not None and self.byte_decoder.own:
            hidden = self.special_ids if skip_special_tokens else frozenset()
            return self.byte_decoder.decode([token_id for token_id in known if token_id not in hidden])
        with no_panic():
            text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def text_of(self, token_id: int) -> str:
        """The text of one token, a special one too. Remembered: candidates are named over and over."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token(self, token_id: int) -> str:
        """The vocabulary's spelling of a token, "" for an id that the tokenizer does not know."""
        if not self.knows(token_id):
            return ""
        token: str = self._backend.id_to_token(token_id)
        return token

    def knows(self, token_id: int) -> bool:
        """Whether the tokenizer has this id; a model's vocabulary may be padded beyond it."""
        return 0 <= token_id < self.vocab_size and self._backend.id_to_token(token_id) is not None

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, by its spelling."""
        found: int | None = self._backend.token_to_id(token)
        return found

    @cached_property
    def special_spellings(self) -> tuple[str, ...]:
        """How special tokens are spelled, the longest first."""
        return tuple(sorted(filter(None, map(self.token, self.special_ids)), key=len, reverse=True))

    @cached_property
    def special_beginnings(self) -> frozenset[str]:
        """All beginnings of these in small letters, but not whole ones."""
        spellings = map(str.lower, self.special_spellings)
        return frozenset(text[:end] for text in spellings for end in range(1, len(text)))

    @cached_property
    def special_endings(self) -> frozenset[str]:
        """All endings of these of two characters or more, in small letters, but not whole ones."""
        spellings = map(str.lower, self.special_spellings)
        return frozenset(text[start:] for text in spellings for start in range(1, len(text) - 1))

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)

    def _plain_backend(self) -> Any:
        with self._lock:
            if self._plain is None:
                state = self._backend.to_str()
                plain = tokenizers.Tokenizer.from_str(state)
                plain.encode_special_tokens = True
                model = json.loads(state)["model"]
                unknown = model.get("unk_token")
                self._unknown_id = model.get("unk_id") if unknown is None else self.token_id(unknown)
                self._plain = plain
            return self._plain

    def _check_plain(self, encoding: Any) -> None:
        """Some models (Unigram) hold the special tokens as ordinary pieces too, and find them in text."""
        if self.special_ids.isdisjoint(encoding.ids):
            return
        for token_id, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if not added and token_id in self.special_ids and token_id != self._unknown_id:
                raise PromptError(
                    f"the text spells the special token {self.token(token_id)!r}: "
                    "this tokenizer cannot read it as plain text, so it is not allowed here"
                )


def check_text(text: object) -> None:
    if not isinstance(text, str):
        raise PromptError(f"a text is of type {type(text).__name__}: it must be a string")
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}: "
            "only valid Unicode can be tokenized"
        ) from None


def _missing(folder: Path) -> str:
    others = [
        name
        for name in ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
        if (folder / name).is_file()
    ]
    note = f" ({', '.join(others)} is there, but cannot be read without it)" if others else ""
    return (
        f"no tokenizer.json in {folder}{note}: "
        "give a folder that has one, or set skip_tokenizer_init and give prompts as token ids"
    )


def _complete(backend: Any, declared: Mapping[int, dict[str, Any]], specials: Mapping[str, str]) -> None:
    """Give the backend the added tokens that only the configuration knows, and mark the named ones special.

    A token is added only where it gets the id that the configuration declares; one whose id would be
    made up here has no row in the model.
    """
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    vocabulary = backend.get_vocab(True)
    next_id = max(vocabulary.values(), default=-1) + 1
    named = set(specials.values())
    for token_id, token in declared.items():
        content = token["content"]
        special = bool(token.get("special", False)) or content in named
        if known.get(content) == special or vocabulary.get(content, next_id) != token_id:
            continue
        flags = {
            key: bool(token[key]) for key in ("lstrip", "rstrip", "normalized", "single_word") if key in token
        }
        added = tokenizers.AddedToken(content, special=special, **flags)
        (backend.add_special_tokens if special else backend.add_tokens)([added])
        known[content] = special
        next_id = max(next_id, token_id + 1)
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(text, special=True)
            for text in named
            if text in vocabulary and not known.get(text)
        ]
    )
