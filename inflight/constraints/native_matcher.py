"""Matchers that compiled threads advance without the GIL, by the C functions of llguidance's own library.

A `NativeState` does what an `LLMatcher` does, and computes the same masks. Python's objects cannot be reached without
the GIL, and the engine's thread seldom releases it: a mask thread in Python waits for it several times in each step.

The C functions come with llguidance's extension module, whose layout of structures is checked before it is used. Where
they, a compiler or the expected layout are missing, masks are computed by a thread in Python.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.constraints.vocabulary import SLICES, TokenPieces, Vocabulary
from inflight.layers.native.build import SOURCE_FOLDER, NativeBuildError, build, cache_folder, find_compiler

logger = logging.getLogger(__name__)

MAX_THREADS = 8
SPECIAL = b"\xff"  # the first byte of a token that matches no text
UNKNOWN = -(1 << 31)  # a token that has not arrived yet, as in masks.cpp

_P, _L, _I, _U, _S = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_size_t
_TOKENIZE = ctypes.CFUNCTYPE(_S, _P, _P, _S, _P, _S)


class _ParserLimits(ctypes.Structure):
    _fields_ = (
        ("max_items_in_row", _S),
        ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", _S),
        ("max_lexer_states", _S),
        ("max_grammar_size", _S),
        ("precompute_large_lexemes", ctypes.c_bool),
        ("verbose_errors", ctypes.c_bool),
    )


class _MatcherOptions(ctypes.Structure):
    _fields_ = (
        ("tokenizer", _P),
        ("log_buffer_level", _U),
        ("log_stderr_level", _U),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("limits", _ParserLimits),
        ("unused", ctypes.c_byte * 256),  # a larger structure would be written here
    )


class _TokenizerOptions(ctypes.Structure):
    _fields_ = (
        ("struct_size", _S),
        ("vocab_size", _U),
        ("tok_eos", _U),
        ("token_lens", _P),
        ("token_bytes", _P),
        ("tokenizer_json", _P),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", _TOKENIZE),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", _P),
        ("slices", _P),
        ("tok_eos_extra", _P),
        ("tok_eos_extra_count", _U),
    )


class NativeFunctions:
    """The C functions of llguidance, and ours that call them from threads."""

    def __init__(self, llguidance: Path, library: Path) -> None:
        """Raises OSError or AttributeError if the functions are missing or have another layout."""
        self._llguidance = ctypes.CDLL(str(llguidance))
        self._library = ctypes.CDLL(str(library))
        self.set_defaults = self._bind("llg_constraint_init_set_defaults", None, _P, _P)
        self.new_tokenizer = self._bind("llg_new_tokenizer_v2", _P, _P, _P, _S)
        self.free_tokenizer = self._bind("llg_free_tokenizer", None, _P)
        self.new_matcher = self._bind("llg_new_matcher", _P, _P, ctypes.c_char_p, ctypes.c_char_p)
        self.clone_matcher = self._bind("llg_clone_matcher", _P, _P)
        self.free_matcher = self._bind("llg_free_matcher", None, _P)
        self.is_error = self._bind("llg_matcher_is_error", ctypes.c_bool, _P)
        self.get_error = self._bind("llg_matcher_get_error", ctypes.c_char_p, _P)
        self.is_stopped = self._bind("llg_matcher_is_stopped", ctypes.c_bool, _P)
        self.mask_bytes = self._bind("llg_matcher_get_mask_byte_size", _S, _P)
        self.compute_mask = self._bind("llg_matcher_compute_mask_into", _I, _P, _P, _S)
        self.consume_token = self._bind("llg_matcher_consume_token", _I, _P, _U)
        self.consume_tokens = self._bind("llg_matcher_consume_tokens", _I, _P, _P, _S)
        self.validate_tokens = self._bind("llg_matcher_validate_tokens", _I, _P, _P, _S)
        self.open_threads = self._bind("inflight_masks_open", _P, _L, _P, _P, _P, _L)
        self.submit = self._bind("inflight_masks_submit", _L, *(_P,) * 5, _L, _P, _L, *(_P,) * 3)
        self.wait = self._bind("inflight_masks_wait", _I, _P, _L, _L)
        self.times = self._bind("inflight_masks_times", None, _P, _P)
        self.close_threads = self._bind("inflight_masks_close", None, _P)
        self._check_layout()

    def _bind(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        library = self._library if name.startswith("inflight_") else self._llguidance
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        return function  # type: ignore[no-any-return]

    def _check_layout(self) -> None:
        """Compare the defaults that llguidance writes into a structure with what Python's class documents."""
        options = _MatcherOptions()
        ctypes.memset(ctypes.byref(options), 0xAA, ctypes.sizeof(options))
        self.set_defaults(ctypes.byref(options), None)
        limits = options.limits
        sizes = (
            limits.max_items_in_row,
            limits.step_max_items,
            limits.max_lexer_states,
            limits.max_grammar_size,
        )
        is_known = (
            options.tokenizer is None
            and not options.ff_tokens_ok
            and not options.backtrack_ok
            and sizes == (2_000, 50_000, 250_000, 500_000)
            and (limits.initial_lexer_fuel, limits.step_lexer_fuel) == (1_000_000, 200_000)
            and limits.verbose_errors
            and set(bytes(options.unused)) == {0xAA}
        )
        if not is_known:
            raise OSError("llguidance's structures have an unknown layout")


@cache
def native_functions() -> NativeFunctions | None:
    """Return the functions, or None if they are not available here or disabled by INFLIGHT_NATIVE=0."""
    compiler = find_compiler()
    if os.environ.get("INFLIGHT_NATIVE") == "0" or compiler is None or os.name != "posix":
        return None
    try:
        from llguidance import _lib

        return NativeFunctions(
            Path(str(_lib.__file__)), build(compiler, cache_folder(), SOURCE_FOLDER / "masks")
        )
    except ImportError:
        return None
    except (NativeBuildError, OSError, AttributeError) as error:
        logger.warning(
            "Masks of constrained requests are computed in Python, which slows down small models: %s", error
        )
        return None


class NativeTokenizer:
    """llguidance's view of a vocabulary, for matchers by its C functions."""

    def __init__(self, functions: NativeFunctions, vocabulary: Vocabulary) -> None:
        self.functions = functions
        pieces = TokenPieces(vocabulary)
        special = set(pieces.special_token_ids)
        tokens = [SPECIAL + token if i in special else token for i, token in enumerate(pieces.tokens)]
        sizes, text = np.array([*map(len, tokens)], dtype=np.uint32), b"".join(tokens)
        ends = np.array(vocabulary.eos_token_ids, dtype=np.uint32)
        slices = (ctypes.c_char_p * (len(SLICES) + 1))(*(regex.encode() for regex in SLICES), None)
        self._tokenize = _TOKENIZE(_tokenize_with(pieces))  # must outlive the tokenizer
        options = _TokenizerOptions(
            struct_size=ctypes.sizeof(_TokenizerOptions),
            vocab_size=len(tokens),
            tok_eos=int(ends[0]),
            token_lens=sizes.ctypes.data,
            token_bytes=ctypes.cast(ctypes.c_char_p(text), _P),
            tokenize_assumes_string=True,
            tokenize_fn=self._tokenize,
            slices=ctypes.cast(slices, _P),
            tok_eos_extra=ends[1:].ctypes.data if len(ends) > 1 else None,
            tok_eos_extra_count=len(ends) - 1,
        )
        message = ctypes.create_string_buffer(256)
        self.handle = functions.new_tokenizer(ctypes.byref(options), message, len(message))
        if self.handle is None:
            raise OSError(f"llguidance rejects the vocabulary: {message.value.decode(errors='replace')}")
        weakref.finalize(self, functions.free_tokenizer, self.handle)

    def state(self, grammar: str, limits: Mapping[str, int]) -> NativeState:
        """Compile a grammar. Python's `LLMatcher` must have compiled it before: a panic here ends the process."""
        options = _MatcherOptions()
        self.functions.set_defaults(ctypes.byref(options), self.handle)
        options.log_buffer_level = options.log_stderr_level = 0
        for name, value in limits.items():
            setattr(options.limits, name, value)
        options.limits.verbose_errors = False
        syntax = b"llguidance" if grammar.startswith("{") else b"lark"
        handle = self.functions.new_matcher(ctypes.byref(options), syntax, grammar.encode())
        return NativeState(self, handle)


def _tokenize_with(pieces: TokenPieces) -> Callable[..., int]:
    def tokenize(_user_data: int, text: int, size: int, output: int, max_tokens: int) -> int:
        token_ids = pieces(ctypes.string_at(text, size).decode(errors="replace"))
        written = np.array(token_ids[:max_tokens], dtype=np.uint32)
        if written.size:
            ctypes.memmove(output, written.ctypes.data, written.nbytes)
        return len(token_ids)

    return tokenize


class NativeState:
    """The state of a matcher. Has those methods of `LLMatcher` that are used here."""

    def __init__(self, tokenizer: NativeTokenizer, handle: int) -> None:
        self._tokenizer = tokenizer
        self._functions = tokenizer.functions
        self.handle = handle
        weakref.finalize(self, _free, tokenizer, handle)

    def deep_copy(self) -> NativeState:
        return NativeState(self._tokenizer, self._functions.clone_matcher(self.handle))

    def is_error(self) -> bool:
        return bool(self._functions.is_error(self.handle))

    def get_error(self) -> str:
        return (self._functions.get_error(self.handle) or b"").decode(errors="replace")

    def is_stopped(self) -> bool:
        return bool(self._functions.is_stopped(self.handle))

    def compute_bitmask(self) -> bytes:
        mask = np.zeros(self._functions.mask_bytes(self.handle) // 4, dtype=np.int32)
        self.fill(mask)
        return mask.tobytes()

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next, or none after an error."""
        if self._functions.compute_mask(self.handle, mask.ctypes.data, mask.nbytes) != 0:
            mask[:] = 0

    def consume_token(self, token_id: int) -> bool:
        return bool(self._functions.consume_token(self.handle, token_id) == 0)

    def try_consume_tokens(self, token_ids: Sequence[int]) -> int:
        """Consume tokens up to the first that the grammar does not allow; return their number."""
        tokens = np.array(token_ids, dtype=np.uint32)
        count = max(0, self._functions.validate_tokens(self.handle, tokens.ctypes.data, len(tokens)))
        self._functions.consume_tokens(self.handle, tokens.ctypes.data, count)
        return int(count)


def _free(tokenizer: NativeTokenizer, handle: int) -> None:
    """Free a matcher. The argument keeps its tokenizer alive until then."""
    tokenizer.functions.free_matcher(handle)


class NativeBatch:
    """The rows of a step whose matchers are native, as the arrays that the threads read."""

    def __init__(
        self,
        states: Sequence[NativeState],
        groups: Sequence[int],
        places: Sequence[int],
        samples: Sequence[int],
        allowed: Sequence[NDArray[np.int32] | None],
    ) -> None:
        """Matcher i gets token samples[i] and fills mask places[i]. One thread takes all matchers of a group."""
        order = sorted(range(len(states)), key=groups.__getitem__)
        self._owners = states, allowed  # for as long as the threads may use them
        self.order = order
        self.handles = np.array([states[i].handle for i in order], dtype=np.uintp)
        self.places = np.array([places[i] for i in order], dtype=np.int32)
        self.samples = np.array([samples[i] for i in order], dtype=np.int32)
        addresses = [0 if mask is None else mask.ctypes.data for mask in allowed]
        self.allowed = np.array([addresses[i] for i in order], dtype=np.uintp)
        sizes = np.unique([groups[i] for i in order], return_counts=True)[1]
        self.group_ends = np.cumsum(sizes, dtype=np.int32)
        self.failed = np.zeros(len(order), dtype=np.int32)
        rows = (self.handles, self.places, self.samples, self.allowed)
        self.arguments = (
            *(array.ctypes.data for array in rows),
            len(order),
            self.group_ends.ctypes.data,
            len(sizes),
        )

    def failures(self) -> list[int]:
        """Return the matchers that have failed, once the batch is completed."""
        return [self.order[i] for i in np.flatnonzero(self.failed).tolist()]


class MaskThreads:
    """Threads that wait for sampled tokens, advance matchers and fill masks, all without the GIL."""

    def __init__(self, functions: NativeFunctions, masks: NDArray[np.int32], num_threads: int) -> None:
        self._functions, self._masks = functions, masks
        called = (functions.is_stopped, functions.consume_token, functions.compute_mask)
        addresses = (ctypes.cast(function, _P) for function in called)  # type: ignore[arg-type]
        self._handle = functions.open_threads(num_threads, *addresses, masks.shape[1])
        self.close = weakref.finalize(self, functions.close_threads, self._handle)
        self.num_submitted = 0

    def submit(self, batch: NativeBatch, tokens: NDArray[np.int32]) -> int:
        """Start a batch whose tokens are `UNKNOWN` until they arrive. Both must live until it is completed."""
        self.num_submitted = self._functions.submit(
            self._handle,
            *batch.arguments,
            tokens.ctypes.data,
            self._masks.ctypes.data,
            batch.failed.ctypes.data,
        )
        return self.num_submitted

    def wait(self, number: int, seconds: float) -> bool:
        """Wait for a batch, and those before it. Return whether they are completed."""
        return bool(self._functions.wait(self._handle, number, int(1e9 * seconds)))

    def times(self) -> tuple[float, float]:
        """Return when the last completed batch had its tokens and its masks, in seconds of `time.monotonic`."""
        times = np.zeros(2, dtype=np.int64)
        self._functions.times(self._handle, times.ctypes.data)
        return float(times[0]) / 1e9, float(times[1]) / 1e9
