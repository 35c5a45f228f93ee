"""Embeddings, classes, scores and rankings as JSON.

Arrays are encoded one vector at a time, so that a thread that encodes thousands of them lets others run in between.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from inflight.outputs import Classifications, Embeddings, Ranking, Scores

_encode = msgspec.json.encode
LITTLE_ENDIAN = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The first fields of every answer."""

    request_id: str
    created: int
    model: str

    def fields(self) -> dict[str, Any]:
        return {"id": self.request_id, "object": "list", "created": self.created, "model": self.model}


Pooled = Embeddings | Classifications | Scores | Ranking


def usage_of(pooled: Pooled) -> dict[str, Any]:
    return {
        "prompt_tokens": pooled.num_prompt_tokens,
        "completion_tokens": 0,
        "total_tokens": pooled.num_prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": pooled.num_cached_tokens},
    }


def write_embeddings(head: AnswerHead, pooled: Embeddings, base64: bool) -> bytes:
    write = _base64 if base64 else _numbers
    items = [
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, write(vector))
        for index, vector in enumerate(pooled.vectors)
    ]
    return _join({**head.fields(), "usage": usage_of(pooled)}, items)


def write_classes(head: AnswerHead, pooled: Classifications) -> bytes:
    names = [_encode(label) for label in pooled.labels]
    best = pooled.vectors.argmax(axis=1).tolist()
    items = [
        b'{"index":%d,"label":%b,"probs":%b,"num_classes":%d}'
        % (index, names[best[index]], _numbers(vector), len(names))
        for index, vector in enumerate(pooled.vectors)
    ]
    shared = {"scale": pooled.scale, "labels": pooled.labels, "usage": usage_of(pooled)}
    return _join({**head.fields(), **shared}, items)


def write_scores(head: AnswerHead, pooled: Scores) -> bytes:
    scores = enumerate(pooled.values.tolist())
    items = [{"object": "score", "index": index, "score": score} for index, score in scores]
    return _encode({**head.fields(), "scale": pooled.scale, "data": items, "usage": usage_of(pooled)})


def write_ranking(head: AnswerHead, pooled: Ranking, documents: Sequence[Any] | None) -> bytes:
    """Return the JSON of a ranking, with the documents of the request unless they are None."""
    items = []
    for result in pooled.results:
        item: dict[str, Any] = {"index": result.index, "relevance_score": result.relevance_score}
        if documents is not None:
            document = documents[result.index]
            item["document"] = {"text": document} if isinstance(document, str) else document
        items.append(item)
    return _encode(
        {
            "id": head.request_id,
            "model": head.model,
            "results": items,
            "scale": pooled.scale,
            "usage": usage_of(pooled),
            "meta": {
                "api_version": {"version": "2"},
                "tokens": {"input_tokens": pooled.num_prompt_tokens, "output_tokens": 0},
                "cached_tokens": pooled.num_cached_tokens,
            },
        }
    )


def _numbers(vector: Any) -> bytes:
    return _encode(vector.tolist())


def _base64(vector: Any) -> bytes:
    return b'"%b"' % b2a_base64(np.ascontiguousarray(vector, LITTLE_ENDIAN).data, newline=False)


def _join(fields: dict[str, Any], items: list[bytes]) -> bytes:
    return b'%b,"data":[%b]}' % (_encode(fields)[:-1], b",".join(items))
