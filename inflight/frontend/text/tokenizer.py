"""Text to token ids and back, based on the `tokenizers` package."""

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

from inflight.checkpoint.files import MAX_TOKENIZER_BYTES, read_file, read_object
from inflight.checkpoint.gguf_file import GgufFile, is_gguf
from inflight.errors import InflightError, ModelError, PromptError, clipped, shown
from inflight.frontend.text.chat_template import ChatTemplateSource, read_chat_template, read_template_option
from inflight.frontend.text.detokenizer import ByteDecoder
from inflight.frontend.text.gguf_tokenizer import read_gguf_tokenizer

# The characters of all pieces of special tokens, which `special_prefixes` and `special_suffixes` hold.
MAX_SPECIAL_PIECES = 1 << 26
# The names of special tokens in templates and configurations.
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TextFrame:
    """The special tokens that a tokenizer puts around a text, or around and between a pair of texts.

    A frame is read from the post-processor once, so that texts can be tokenized, truncated and joined separately:

        before, text, after        or        before, first text, between, second text, after
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    between: tuple[int, ...] = ()
    # Where token type 1 starts, counted from the end of the first text; None if all tokens are of type 0.
    second_offset: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def around(self, ids: list[int]) -> list[int]:
        return [*self.before, *ids, *self.after]

    def around_pair(self, first: list[int], second: list[int]) -> tuple[list[int], int]:
        """Return all ids, and where the second segment (token type 1) starts; 0 if there is none."""
        ids = [*self.before, *first, *self.between, *second, *self.after]
        offset = self.second_offset
        return ids, 0 if offset is None else len(self.before) + len(first) + offset


def _read_frame(backend: Any, pair: bool) -> TextFrame:
    """Return the frame of a `tokenizers.Tokenizer` for a text or a pair."""
    encoding = backend.encode("a", "b") if pair else backend.encode("a")
    groups = [
        (which, list(group)) for which, group in groupby(enumerate(encoding.sequence_ids), lambda x: x[1])
    ]
    texts = [which for which, _ in groups if which is not None]
    if texts != ([0, 1] if pair else [0]):
        what = "two texts" if pair else "a text"
        raise ModelError(
            f"this tokenizer cannot be used: its post-processor does not keep {what} whole and in order"
        )
    parts: list[list[int]] = [[]]
    for which, group in groups:
        if which is None:
            parts[-1] = [encoding.ids[index] for index, _ in group]
        else:
            parts.append([])
    second = encoding.type_ids.index(1) if pair and 1 in encoding.type_ids else None
    end_of_first = next(group[-1][0] + 1 for which, group in groups if which == 0)
    return TextFrame(
        before=tuple(parts[0]),
        between=tuple(parts[1]) if pair else (),
        after=tuple(parts[-1]),
        second_offset=None if second is None else second - end_of_first,
    )


class TokenizerPanicError(InflightError, RuntimeError):
    """The Rust code of the `tokenizers` package panicked, because of a bug or an invalid tokenizer.json."""


@contextmanager
def translate_panics() -> Iterator[None]:
    """Turn Rust panics into an `Exception`: they derive from BaseException, so handlers of one request miss them."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerPanicError(f"the tokenizer panicked: {error}") from error


class Tokenizer:
    """A checkpoint's tokenizer. It is immutable after loading, hence thread-safe."""

    def __init__(
        self,
        backend: Any,  # a tokenizers.Tokenizer, which has no type hints
        *,
        specials: Mapping[str, str] | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        chat_template: ChatTemplateSource | None = None,
    ) -> None:
        self.folder: Path | None = None  # the folder or GGUF file that it was loaded from
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens: dict[str, str] = dict(specials or {})
        self.chat_template = chat_template
        self.vocab_size: int = max(backend.get_vocab(True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.added_ids: frozenset[int] = frozenset(added)  # tokens that stand for one text, special or not
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        if sum(len(text) ** 2 for text in self.special_spellings) > MAX_SPECIAL_PIECES:
            raise ModelError(f"the special tokens are too long: {shown(self.special_spellings[0])}")
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        # A post-processor that adds tokens takes precedence; otherwise the flags of the configuration apply.
        adds_none = backend.num_special_tokens_to_add(False) == 0
        self._before = [self.bos_token_id] if adds_none and add_bos and self.bos_token_id is not None else []
        self._after = [self.eos_token_id] if adds_none and add_eos and self.eos_token_id is not None else []
        self.byte_decoder = ByteDecoder.from_backend(backend)
        self._texts: dict[int, str] = {}  # of single tokens, cached on first use
        self._plain: Any = None  # a backend that ignores special tokens in text, created on first use
        self._unknown_id: int | None = None  # set together with it
        self._lock = threading.Lock()

    @classmethod
    def load(cls, folder: Path, template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a checkpoint's folder, or of a GGUF file.

        `template` is a chat template, or the path of one, that replaces the checkpoint's.
        """
        path = Path(folder)
        in_gguf = is_gguf(path) and path.is_file()
        source = None if template is None else read_template_option(template)
        try:
            with translate_panics():
                tokenizer = cls._from_gguf(path, source) if in_gguf else cls._from_folder(path, source)
                tokenizer.encode("A test: é 1.")
        except ModelError:
            raise
        except Exception as error:  # the package raises bare Exception, and damaged files cause others here
            where = f"the tokenizer in {path}" if in_gguf else path / "tokenizer.json"
            reason = clipped(" ".join(str(error).split()), 300)
            raise ModelError(f"{where} cannot be used: {reason}") from error
        tokenizer.folder = path
        return tokenizer

    @classmethod
    def _from_folder(cls, folder: Path, template: str | None) -> Tokenizer:
        content = read_file(folder, "tokenizer.json", MAX_TOKENIZER_BYTES)
        if content is None:
            raise ModelError(_missing_message(folder))
        config = read_object(folder, "tokenizer_config.json") or {}
        specials = _read_special_tokens(folder, config)
        backend = tokenizers.Tokenizer.from_buffer(content)
        _add_declared_tokens(backend, _read_added_tokens(folder, config), specials)
        return cls(
            backend,
            specials=specials,
            add_bos=config.get("add_bos_token") is True,
            add_eos=config.get("add_eos_token") is True,
            chat_template=read_chat_template(folder, config) if template is None else template,
        )

    @classmethod
    def _from_gguf(cls, path: Path, template: str | None) -> Tokenizer:
        read = read_gguf_tokenizer(GgufFile.open(path))
        return cls(
            read.backend,
            specials=read.specials,
            add_bos=read.add_bos,
            add_eos=read.add_eos,
            chat_template=template or read.templates or None,
        )

    @cached_property
    def max_characters_per_token(self) -> int | None:
        """The most characters that a token can stand for; None if there is no limit."""
        if self.byte_decoder is None:
            return None
        longest = max(map(len, self._backend.get_vocab(True)), default=1)
        return 4 * longest  # a letter and its accents may be normalized to one character

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        With `parse_special=False` a special token spelled in the text is plain text, so that special tokens come only
        from `add_special_tokens`.
        """
        return self.encode_batch([text], add_special_tokens, parse_special=parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, parse_special: bool = True
    ) -> list[list[int]]:
        for text in texts:
            check_text(text)
        backend = self._backend if parse_special else self._plain_backend()
        # The fast variant omits the offsets, which cost more than the ids.
        with translate_panics():
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        if not parse_special:
            for encoding in encodings:
                self._check_plain(encoding)
        if add_special_tokens and (self._before or self._after):
            return [[*self._before, *encoding.ids, *self._after] for encoding in encodings]
        return [encoding.ids for encoding in encodings]

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts without any special tokens, even if a text spells one.

        A few tokenizer models always recognize spelled special tokens: for them the spelling is broken by a space.
        """
        backend = self._plain_backend()
        with translate_panics():
            batch = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        forbidden = self.special_ids - {self._unknown_id}
        for index, ids in enumerate(batch):
            if not forbidden.isdisjoint(ids):
                batch[index] = self.encode(self._break_specials(texts[index]), False, parse_special=False)
        return batch

    def _break_specials(self, text: str) -> str:
        for special in self.special_spellings:
            text = text.replace(special, f"{special[:1]} {special[1:]}")
        return text

    @cached_property
    def frame(self) -> TextFrame:
        """The special tokens that `encode` puts around a text."""
        if self._before or self._after:
            return TextFrame(tuple(self._before), tuple(self._after))
        with translate_panics():
            return _read_frame(self._backend, pair=False)

    @cached_property
    def pair_frame(self) -> TextFrame:
        """The special tokens around and between the two texts of a pair."""
        if self._before or self._after:
            between = (*self._after, *self._before)
            return TextFrame(tuple(self._before), tuple(self._after), between)
        with translate_panics():
            return _read_frame(self._backend, pair=True)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Unknown ids have no text."""
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        if self.byte_decoder is not None and self.byte_decoder.differs:
            hidden = self.special_ids if skip_special_tokens else frozenset()
            return self.byte_decoder.decode([token_id for token_id in known if token_id not in hidden])
        with translate_panics():
            text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def text_of(self, token_id: int) -> str:
        """Return the text of one token, even a special one. Cached, as logprobs name the same candidates repeatedly."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token(self, token_id: int) -> str:
        """Return the vocabulary's spelling of a token, or "" for an unknown id."""
        if not self.knows(token_id):
            return ""
        token: str = self._backend.id_to_token(token_id)
        return token

    def knows(self, token_id: int) -> bool:
        """Return whether the tokenizer has this id; a model's vocabulary may be padded beyond it."""
        return 0 <= token_id < self.vocab_size and self._backend.id_to_token(token_id) is not None

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry by its spelling."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @cached_property
    def special_spellings(self) -> tuple[str, ...]:
        """The spellings of the special tokens, longest first."""
        return tuple(sorted(filter(None, map(self.token, self.special_ids)), key=len, reverse=True))

    @cached_property
    def special_prefixes(self) -> frozenset[str]:
        """All proper prefixes of the special spellings, in lower case."""
        spellings = map(str.lower, self.special_spellings)
        return frozenset(text[:end] for text in spellings for end in range(1, len(text)))

    @cached_property
    def special_suffixes(self) -> frozenset[str]:
        """All proper suffixes of at least two characters of the special spellings, in lower case."""
        spellings = map(str.lower, self.special_spellings)
        return frozenset(text[start:] for text in spellings for start in range(1, len(text) - 1))

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)

    def _plain_backend(self) -> Any:
        with self._lock:
            if self._plain is None:
                state = self._backend.to_str()
                backend = tokenizers.Tokenizer.from_str(state)
                backend.encode_special_tokens = True
                model = json.loads(state)["model"]
                unknown = model.get("unk_token")
                self._unknown_id = model.get("unk_id") if unknown is None else self.token_id(unknown)
                self._plain = backend
            return self._plain

    def _check_plain(self, encoding: Any) -> None:
        """Reject special tokens in plain text: some models (Unigram) also have them as ordinary pieces."""
        if self.special_ids.isdisjoint(encoding.ids):
            return
        for token_id, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if not added and token_id in self.special_ids and token_id != self._unknown_id:
                raise PromptError(
                    f"the text contains the special token {self.token(token_id)!r}: "
                    "this tokenizer cannot encode it as plain text, so it is not allowed here"
                )


def check_text(text: object) -> None:
    """Raise PromptError unless the text is a string of valid Unicode."""
    if not isinstance(text, str):
        raise PromptError(f"the text is of type {type(text).__name__}: it must be a string")
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text contains a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}: "
            "only valid Unicode can be tokenized"
        ) from None


def _missing_message(folder: Path) -> str:
    others = [
        name
        for name in ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
        if (folder / name).is_file()
    ]
    note = f" (there is {', '.join(others)}, which is not supported)" if others else ""
    return (
        f"no tokenizer.json in {folder}{note}: "
        "use a checkpoint that has one, or set skip_tokenizer_init and send prompts as token ids"
    )


def _read_special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens. tokenizer_config.json overrides the older special_tokens_map.json."""
    named = {**(read_object(folder, "special_tokens_map.json") or {}), **config}
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = named.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the tokens that tokenizer_config.json or added_tokens.json declares, by id in ascending order."""
    declared: dict[int, dict[str, Any]] = {}
    try:
        for text, token_id in (read_object(folder, "added_tokens.json") or {}).items():
            declared[int(token_id)] = {"content": text}
        for token_id, token in (config.get("added_tokens_decoder") or {}).items():
            if isinstance(token, dict) and isinstance(token.get("content"), str):
                declared[int(token_id)] = token
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"the added tokens of {folder} are not a mapping between ids and tokens: {error}"
        ) from error
    return dict(sorted(declared.items()))


def _add_declared_tokens(
    backend: Any, declared: Mapping[int, dict[str, Any]], specials: Mapping[str, str]
) -> None:
    """Add the tokens that only the configuration declares to the backend, and mark the named ones as special.

    A token is added only if it gets the id that the configuration declares: any other id has no row in the model.
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
