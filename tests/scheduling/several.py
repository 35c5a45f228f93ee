"""A runner that gives several tokens at a time, as one that speculates would."""

from __future__ import annotations

from typing import Any

from inflight.engine.fake import FakeRunner, expected_tokens


class SeveralRunner(FakeRunner):
    """The fake runner three tokens ahead. Only the first of them has a step of its own: the KV of the others is
    computed by the next one."""

    def _sample(self, row: Any, length: int) -> list[int]:
        first = super()._sample(row, length)
        more = [self._ahead(row) for _ in range(2)]
        return [*first, *more]

    def _ahead(self, row: Any) -> int:
        token_id = expected_tokens(row.tokens, 1, self.vocab_size)[0]
        row.tokens.append(token_id)
        return token_id
