"""Whether a constraint can be had, found out where it can do no harm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Literal

from inflight.constraints.attempts import first_success
from inflight.constraints.compiler import LIMITS, GrammarCompiler
from inflight.constraints.kept import KeptOutcomes
from inflight.constraints.trial import GrammarTrials
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import ParameterError
from inflight.structured_outputs import PARAM, StructuredOutputs

MAX_KEPT = 1024  # outcomes


class GrammarValidator:
    """For one vocabulary. With a compiler, which is that of an engine in this process, what is fine is compiled, too;
    an engine elsewhere compiles what it is asked for. Any thread may use it."""

    def __init__(
        self, make_vocabulary: Callable[[], Vocabulary], compiler: GrammarCompiler | None = None
    ) -> None:
        self.compiler = compiler
        self._vocabulary = cache(make_vocabulary)
        self._trials = GrammarTrials(self._vocabulary)
        self._kept: KeptOutcomes[Literal[True]] = KeptOutcomes(MAX_KEPT)

    def validate(self, asked: StructuredOutputs) -> None:
        """Raises ParameterError if it is no grammar, asks for what is not supported, or is too complex."""
        self._kept.get(asked, self._try)
        if self.compiler is not None:
            self.compiler.compile(asked)

    def is_validated(self, asked: StructuredOutputs) -> bool:
        """Whether `validate` would answer at once."""
        return self._kept.known(asked) is not None and (
            self.compiler is None or self.compiler.is_compiled(asked)
        )

    def warm_up(self) -> None:
        """Make what the first constraint would wait for, if constraints can be had at all."""
        with contextlib.suppress(ParameterError):
            self._check_installed()
            self._trials.start()
        if self.compiler is not None:
            self.compiler.warm_up()

    def close(self) -> None:
        """End the processes that try grammars."""
        self._trials.close()

    def _try(self, asked: StructuredOutputs) -> Literal[True]:
        self._check_installed()
        return first_success(asked, self._special_texts, self._attempt)

    def _attempt(self, grammar: str) -> Literal[True] | str:
        return self._trials.attempt(grammar, LIMITS) or True

    @staticmethod
    def _check_installed() -> None:
        if find_spec("llguidance") is None:
            raise ParameterError(
                f"{PARAM} is given: that needs llguidance, so install inflight-llm[constraints]",
                param=PARAM,
                code="constraints_unavailable",
            )

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        return self._vocabulary().special_texts()
