"""Calls of models that embed, classify or score: their texts become requests, and the head's vectors become results.

Rows of a matrix are texts; everything is float32.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from inflight.errors import EngineError, ParameterError, PromptError, RequestError, shown
from inflight.events import Delta, RequestRecord
from inflight.frontend.input_processor import Prompt, as_ids, check_arguments, split_prompts
from inflight.frontend.scoring_inputs import EncodedText, Pair, ScoringInputs, TextGroup, TextItem
from inflight.outputs import RerankResult
from inflight.request import (
    DEFAULT_CONTEXT,
    ContextOptions,
    Request,
    RequestContext,
    RequestOrigin,
    RequestSpec,
)
from inflight.sampling_params import SamplingParams
from inflight.scoring import ClassifyParams, EmbedParams, PoolingFacts, Scale, ScoreParams, Task, tasks_of

Matrix = NDArray[np.float32]

CHUNK_CHARACTERS = 32_768  # tokenized at a time, which takes a few milliseconds
CHUNK_TEXTS = 256
# Names that models give to their prompts for the two sides of a search.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")
SMALLEST_NORM = 1e-12  # keeps an all-zero embedding at zero

_NO_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True)
class ScoringJob:
    """The texts of one call, and the function that turns their vectors into results."""

    processor: ScoringProcessor
    groups: tuple[TextGroup, ...]
    finish: Callable[[Matrix], Matrix]  # vectors of all texts -> one result for each item
    scale: Scale = "logit"

    @property
    def num_texts(self) -> int:
        return sum(len(group.items) for group in self.groups)

    @property
    def num_characters(self) -> int:
        return sum(_size(item) for group in self.groups for item in group.items)

    def chunks(self) -> Iterator[tuple[TextGroup, int, int]]:
        """Yield (group, start, stop) for all texts in order, in pieces that are tokenized together."""
        for group in self.groups:
            start = size = 0
            for index, item in enumerate(group.items):
                size += _size(item)
                if size >= CHUNK_CHARACTERS or index + 1 - start >= CHUNK_TEXTS:
                    yield group, start, index + 1
                    start, size = index + 1, 0
            if start < len(group.items):
                yield group, start, len(group.items)


def _size(item: TextItem) -> int:
    return len(item[0]) + len(item[1]) if isinstance(item, tuple) else len(item)


class CallOptions(ContextOptions, total=False):
    """The keyword arguments of every call, whatever its task."""

    request_id: str | None
    origin: RequestOrigin | None
    on_record: Callable[[RequestRecord], None]


@dataclass(frozen=True, slots=True)
class ScoringCall:
    """The parameters that all texts of one call share."""

    context: RequestContext
    request_id: str | None = None
    origin: RequestOrigin | None = None
    on_record: Callable[[RequestRecord], None] = lambda _: None  # called for each finished text

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[ScoringCall, Any]:
        """Separate a call's keyword arguments into `CallOptions` and the parameters of its task."""
        params = dict(options)
        names = [item.name for item in fields(cls) if item.name in params]
        return cls(RequestContext.pop(params), **{name: params.pop(name) for name in names}), params


class ScoringProcessor:
    """Turns calls into jobs, and encoded texts into requests. Raises RequestError for what the model cannot do."""

    def __init__(self, facts: PoolingFacts, inputs: ScoringInputs, generates: bool) -> None:
        self.facts = facts
        self.inputs = inputs
        self._generates = generates

    def request(
        self,
        request_id: str,
        text: EncodedText,
        context: RequestContext = DEFAULT_CONTEXT,
        origin: RequestOrigin | None = None,
    ) -> Request:
        return Request(
            RequestSpec(
                request_id=request_id,
                token_ids=text.ids,
                params=_NO_SAMPLING,
                max_tokens=0,
                context=context,
                task="pool",
                splittable=self.facts.splittable,
                second_segment=text.second_segment,
                origin=origin,
            )
        )

    # ---- tasks ----

    def embed(self, texts: Prompt | Sequence[Prompt], params: EmbedParams) -> ScoringJob:
        self._check_call("embed", params, EmbedParams)
        group = TextGroup(
            [_text_item(item, index) for index, item in enumerate(split_prompts(texts))],
            name="text",
            param="texts",
            prompt=self._prompt(params.get("prompt_name"), params.get("prompt")),
            **_truncation(params, "truncate_prompt_tokens"),
        )
        dimensions, normalize = params.get("dimensions"), params.get("normalize")
        self._check_dimensions(dimensions)
        unit = self.facts.normalize if normalize is None else normalize
        return ScoringJob(self, (group,), partial(embedded, dimensions=dimensions, normalize=unit))

    def classify(self, texts: Prompt | Pair | Sequence[Prompt | Pair], params: ClassifyParams) -> ScoringJob:
        self._check_call("classify", params, ClassifyParams)
        sequence: Any = [texts] if _is_pair(texts) else texts
        has_pairs = isinstance(sequence, list) and any(map(_is_pair, sequence))
        items = sequence if has_pairs else split_prompts(sequence)
        group = TextGroup(
            [item if _is_pair(item) else _text_item(item, index) for index, item in enumerate(items)],
            name="text",
            param="texts",
            **_truncation(params, "truncate_prompt_tokens"),
        )
        allowed = ("logit", "sigmoid", "softmax") if self.facts.size > 1 else ("logit", "sigmoid")
        scale = self._scale(params.get("scale"), allowed)
        return ScoringJob(self, (group,), partial(classified, scale=scale), scale)

    def score(
        self, query: str | Sequence[str], documents: str | Sequence[str], params: ScoreParams
    ) -> ScoringJob:
        facts = self.facts
        self._check_call("score", params, ScoreParams)
        instruction = params.get("instruction")
        if instruction is not None and (facts.template is None or not isinstance(instruction, str)):
            reason = "it must be a string" if facts.template is not None else "this model does not take one"
            raise ParameterError.of_value("instruction", instruction, reason)
        truncation = _truncation(params, "max_tokens_per_doc")
        pairs = _pairs(query, documents)
        if facts.scores == "cosine":
            return self._cosines(query, [document for _, document in pairs], params.get("scale"), truncation)
        firsts = {first: self.inputs.first_of(first, instruction) for first in dict(pairs)}
        group = TextGroup(
            [(firsts[first], document) for first, document in pairs],
            name="document",
            param="documents",
            **truncation,
        )
        allowed = ("logit", "sigmoid") if facts.size == 1 else ("logit", "softmax")
        scale = self._scale(params.get("scale"), allowed)
        return ScoringJob(self, (group,), partial(scored, scale=scale), scale)

    def _cosines(
        self,
        query: str | Sequence[str],
        documents: list[str],
        scale: Scale | None,
        truncation: Mapping[str, Any],
    ) -> ScoringJob:
        queries = [query] if isinstance(query, str) else list(query)
        query_prompt, document_prompt = self._side_prompt(QUERY_PROMPTS), self._side_prompt(DOCUMENT_PROMPTS)
        groups = (
            TextGroup(queries, "query", "query", query_prompt),
            TextGroup(documents, "document", "documents", document_prompt, **truncation),
        )
        if scale not in (None, "cosine"):
            raise ParameterError.of_value(
                "scale", scale, "this model compares embeddings, so it must be cosine"
            )
        count = len(queries)
        return ScoringJob(self, groups, lambda vectors: cosines(vectors[:count], vectors[count:]), "cosine")

    # ---- checks ----

    def _check_call(self, task: Task, params: Mapping[str, Any], declared: type) -> None:
        """Check that the model can do the task and that it has these parameters."""
        check_arguments({name: params[name] for name in params if name not in declared.__annotations__})
        if task not in tasks_of(self._generates, self.facts):
            raise unsupported_task(task, self.facts, self._generates)

    def _prompt(self, name: str | None, text: str | None) -> str:
        prompts = self.facts.prompts
        if name is not None and text is not None:
            raise ParameterError("prompt and prompt_name are both given: give only one", param="prompt")
        if text is not None:
            if not isinstance(text, str):
                raise ParameterError.of_value("prompt", text, "it must be a string")
            return text
        name = self.facts.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in prompts:
            names = f"this model has {', '.join(prompts)}" if prompts else "this model has no prompts"
            raise ParameterError.of_value("prompt_name", name, names)
        return prompts[name]

    def _side_prompt(self, names: Sequence[str]) -> str:
        return self._prompt(next((name for name in names if name in self.facts.prompts), None), None)

    def _check_dimensions(self, dimensions: int | None) -> None:
        size, trained = self.facts.size, self.facts.dimensions
        if dimensions is None or (type(dimensions) is int and dimensions in (size, *(trained or ()))):
            return
        if trained is None:
            reason = f"this model's embeddings have {size}, and its files do not say that they may be cut"
        else:
            reason = f"this model was trained for {', '.join(map(str, sorted({*trained, size})))}"
        raise ParameterError.of_value("dimensions", dimensions, reason)

    def _scale(self, scale: Scale | None, allowed: tuple[str, ...]) -> Scale:
        if scale is None:
            return self.facts.scale
        if scale not in allowed or scale not in get_args(Scale):
            raise ParameterError.of_value("scale", scale, f"this model's head allows {', '.join(allowed)}")
        return scale


def unsupported_task(task: Task, facts: PoolingFacts | None, generates: bool) -> RequestError:
    """Return the error for a task that the model cannot do; it names the tasks that it can do."""
    supported = ", ".join(tasks_of(generates, facts))
    return RequestError(
        f"this model cannot {task}: it can {supported}", param="model", code="unsupported_task"
    )


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(text, str) for text in item)


def _text_item(item: Prompt, index: int) -> str | array[int]:
    if isinstance(item, str):
        return item
    try:
        if isinstance(item, Mapping):
            raise PromptError("it is a mapping: it must be text, or a list of token ids")
        return as_ids(item)
    except PromptError as error:
        raise PromptError(f"text {index}: {error}", param="texts") from None


def _pairs(query: Any, documents: Any) -> list[Pair]:
    """Return a query and a document for each score."""
    texts: dict[str, list[str]] = {}
    for param, value in (("query", query), ("documents", documents)):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, Sequence) or isinstance(items, bytes):
            raise PromptError(
                f"{param} is of type {type(value).__name__}: it must be a text, or a list of texts",
                param=param,
            )
        for index, item in enumerate(items):
            if not isinstance(item, str):
                raise PromptError(f"{param}[{index}] is {shown(item)}: it must be a text", param=param)
        texts[param] = list(items)
    num_documents = len(texts["documents"])
    queries = texts["query"] * (num_documents if len(texts["query"]) == 1 else 1)
    if len(queries) != num_documents:
        raise PromptError(
            f"there are {len(queries)} queries for {num_documents} documents: give one query, or one per document",
            param="query",
        )
    return list(zip(queries, texts["documents"], strict=True))


def _truncation(params: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of a `TextGroup` that bound the length of its texts. `name` is the parameter with a limit."""
    max_tokens = params.get(name)
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ParameterError.of_value(name, max_tokens, "it must be an integer of at least 1")
    return {"truncate": params.get("truncate") or max_tokens is not None, "max_tokens": max_tokens}


# ---- results ----


class PooledVectors:
    """The vectors of one call's texts, in the order of the texts, filled in as they arrive."""

    def __init__(self, num_texts: int, size: int) -> None:
        self.matrix: Matrix = np.empty((num_texts, size), dtype=np.float32)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def put(self, index: int, delta: Delta) -> None:
        """Store the vector of a text's last delta. Raises EngineError if it has no usable one."""
        if delta.error is not None:
            raise EngineError(f"text {index} failed: {delta.error}", code=delta.error_code)
        if delta.vector is None:
            raise EngineError(f"text {index} ended without a result: {delta.finish_reason}", code="aborted")
        vector = np.frombuffer(delta.vector, dtype=np.float32)
        if vector.shape != self.matrix.shape[1:]:
            raise EngineError(f"text {index} got {vector.size} numbers: {self.matrix.shape[1]} were expected")
        if not np.isfinite(vector).all():
            raise EngineError(
                f"text {index} has results that are not finite: check the model's weights and its dtype",
                code="logits_not_finite",
            )
        self.matrix[index] = vector
        if delta.record is not None:
            self.num_prompt_tokens += delta.record.num_prompt_tokens
            self.num_cached_tokens += delta.record.num_cached_tokens


def embedded(vectors: Matrix, dimensions: int | None, normalize: bool) -> Matrix:
    """Return embeddings of the requested size. They are cut before they are normalized."""
    vectors = vectors[:, :dimensions]
    return _unit(vectors) if normalize else vectors


def _unit(vectors: Matrix) -> Matrix:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return _matrix(vectors / np.maximum(lengths, SMALLEST_NORM))


def classified(logits: Matrix, scale: Scale) -> Matrix:
    """Return one number for each label, on a scale."""
    if scale == "sigmoid":
        return _sigmoid(logits)
    return _softmax(logits) if scale == "softmax" else logits


def scored(logits: Matrix, scale: Scale) -> Matrix:
    """Return one number for each pair, from one logit, or from two (not relevant, relevant)."""
    if logits.shape[1] == 1:
        return classified(logits, scale)[:, 0]
    return _softmax(logits)[:, 1] if scale == "softmax" else logits[:, 1] - logits[:, 0]


def cosines(queries: Matrix, documents: Matrix) -> Matrix:
    """Return the cosine of each document and its query; one query may serve all documents."""
    return _matrix(np.sum(_unit(queries) * _unit(documents), axis=1))


def check_top_n(top_n: object) -> None:
    if top_n is not None and (not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 1):
        raise ParameterError.of_value("top_n", top_n, "it must be an integer of at least 1")


def ranked(
    scores: Matrix, documents: str | Sequence[str], scale: Scale, top_n: int | None
) -> list[RerankResult]:
    """Return the documents with the highest scores, the best first. Documents with equal scores keep their order."""
    texts = [documents] if isinstance(documents, str) else documents
    order = np.argsort(-scores, kind="stable")[:top_n]
    return [RerankResult(int(index), float(scores[index]), texts[index], scale) for index in order]


def _sigmoid(x: Matrix) -> Matrix:
    small = np.exp(-np.abs(x))  # never overflows
    return _matrix(np.where(x >= 0, 1, small) / (1 + small))


def _softmax(x: Matrix) -> Matrix:
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return _matrix(weights / weights.sum(axis=1, keepdims=True))


def _matrix(values: Any) -> Matrix:
    return np.asarray(values, dtype=np.float32)
