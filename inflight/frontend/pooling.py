"""What a model with a head can be asked: to embed, to classify, to score. What it cannot do is refused here."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from inflight.errors import ParameterError, PromptError, RequestError, shown
from inflight.events import RequestRecord
from inflight.frontend.input_processor import Prompt, as_ids, check_place, check_salt, split_prompts
from inflight.frontend.pooling_inputs import EncodedText, Pair, PoolingInputs, TextGroup, TextItem
from inflight.frontend.pooling_results import Matrix, classified, cosines, embedded, scored
from inflight.pooling import PoolingFacts, Scale, Task, tasks_of
from inflight.request import Request, RequestSpec
from inflight.sampling_params import SamplingParams

CHUNK_CHARACTERS = 32_768  # of texts that are tokenized at a time: a few milliseconds
CHUNK_TEXTS = 256
# Names under which models keep their prompts for the two sides of a search.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")

_NO_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True)
class PoolingJob:
    """The texts of one call, and what becomes of their vectors."""

    groups: tuple[TextGroup, ...]
    finish: Callable[
        [Matrix], Matrix
    ]  # from what the head returned for all texts to one result for each item
    scale: Scale = "logit"

    @property
    def num_texts(self) -> int:
        return sum(len(group.items) for group in self.groups)

    @property
    def num_characters(self) -> int:
        return sum(_size(item) for group in self.groups for item in group.items)

    def chunks(self) -> Iterator[tuple[TextGroup, int, int]]:
        """(group, start, stop), in order: all texts, as many at a time as are worth tokenizing together."""
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


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Whose call it is, and before whom it goes: the same for all its texts."""

    request_id: str | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    on_record: Callable[[RequestRecord], None] = field(default=lambda _: None)  # of each text that is done

    def __post_init__(self) -> None:
        check_place(self.priority, self.tenant)
        check_salt(self.cache_salt)


class PoolingProcessor:
    """Turns calls into jobs, and encoded texts into requests."""

    def __init__(self, facts: PoolingFacts, inputs: PoolingInputs, generates: bool) -> None:
        self.facts = facts
        self.inputs = inputs
        self._generates = generates

    def request(self, request_id: str, text: EncodedText, context: RequestContext) -> Request:
        return Request(
            RequestSpec(
                request_id=request_id,
                token_ids=text.ids,
                params=_NO_SAMPLING,
                max_tokens=0,
                priority=context.priority,
                tenant=context.tenant,
                cache_salt=context.cache_salt,
                kind="pool",
                splittable=self.facts.splittable,
                second_segment=text.second_segment,
            )
        )

    # ---- what can be asked ----

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        prompt_name: str | None,
        prompt: str | None,
        dimensions: int | None,
        normalize: bool | None,
        truncate: bool,
        truncate_prompt_tokens: int | None = None,
    ) -> PoolingJob:
        facts = self.facts
        self._need("embed")
        group = TextGroup(
            [_text_item(item, index) for index, item in enumerate(split_prompts(texts))],
            name="text",
            param="texts",
            prompt=self._prompt(prompt_name, prompt),
            strip=True,
            **_cuts(truncate, "truncate_prompt_tokens", truncate_prompt_tokens),
        )
        self._check_dimensions(dimensions)
        unit = facts.normalize if normalize is None else normalize
        return PoolingJob((group,), partial(embedded, dimensions=dimensions, normalize=unit))

    def classify(
        self,
        texts: Prompt | Pair | Sequence[Prompt | Pair],
        scale: Scale | None,
        truncate: bool,
        truncate_prompt_tokens: int | None = None,
    ) -> PoolingJob:
        facts = self.facts
        self._need("classify")
        given: Any = [texts] if _is_pair(texts) else texts
        items = given if isinstance(given, list) and any(map(_is_pair, given)) else split_prompts(given)
        group = TextGroup(
            [item if _is_pair(item) else _text_item(item, index) for index, item in enumerate(items)],
            name="text",
            param="texts",
            **_cuts(truncate, "truncate_prompt_tokens", truncate_prompt_tokens),
        )
        allowed = ("logit", "sigmoid", "softmax") if facts.size > 1 else ("logit", "sigmoid")
        found = self._scale(scale, allowed)
        return PoolingJob((group,), partial(classified, scale=found), found)

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        scale: Scale | None,
        instruction: str | None,
        truncate: bool,
        max_tokens_per_doc: int | None,
    ) -> PoolingJob:
        facts = self.facts
        self._need("score")
        if instruction is not None and (facts.template is None or not isinstance(instruction, str)):
            reason = "it must be a string" if facts.template is not None else "this model reads none"
            raise ParameterError(f"instruction is {shown(instruction)}: {reason}", param="instruction")
        cuts = _cuts(truncate, "max_tokens_per_doc", max_tokens_per_doc)
        pairs = _pairs(query, documents)
        if facts.scores == "cosine":
            return self._cosines(query, [document for _, document in pairs], scale, cuts)
        firsts = {first: self.inputs.first_of(first, instruction) for first in dict(pairs)}
        group = TextGroup(
            [(firsts[first], document) for first, document in pairs],
            name="document",
            param="documents",
            strip=facts.scores == "pair",
            **cuts,
        )
        found = self._scale(scale, ("logit", "sigmoid") if facts.size == 1 else ("logit", "softmax"))
        return PoolingJob((group,), partial(scored, scale=found), found)

    def _cosines(
        self, query: str | Sequence[str], documents: list[str], scale: Scale | None, cuts: Mapping[str, Any]
    ) -> PoolingJob:
        queries = [query] if isinstance(query, str) else list(query)
        groups = (
            TextGroup(queries, "query", "query", self._side_prompt(QUERY_PROMPTS), strip=True),
            TextGroup(
                documents, "document", "documents", self._side_prompt(DOCUMENT_PROMPTS), strip=True, **cuts
            ),
        )
        if scale not in (None, "cosine"):
            raise ParameterError(
                f"scale is {shown(scale)}: this model compares embeddings, it gives a cosine", param="scale"
            )
        count = len(queries)
        return PoolingJob(groups, lambda found: cosines(found[:count], found[count:]), "cosine")

    # ---- checks ----

    def _need(self, task: Task) -> None:
        if task not in tasks_of(self._generates, self.facts):
            raise cannot(task, self.facts, self._generates)

    def _prompt(self, name: str | None, text: str | None) -> str:
        prompts = self.facts.prompts
        if name is not None and text is not None:
            raise ParameterError("prompt and prompt_name are both given: give one of them", param="prompt")
        if text is not None:
            if not isinstance(text, str):
                raise ParameterError(f"prompt is {shown(text)}: it must be a string", param="prompt")
            return text
        name = self.facts.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in prompts:
            names = f"this model has {', '.join(prompts)}" if prompts else "this model has none"
            raise ParameterError(f"prompt_name is {shown(name)}: {names}", param="prompt_name")
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
            reason = f"this model was trained to give {', '.join(map(str, sorted({*trained, size})))}"
        raise ParameterError(f"dimensions is {shown(dimensions)}: {reason}", param="dimensions")

    def _scale(self, given: Scale | None, allowed: tuple[str, ...]) -> Scale:
        if given is None:
            return self.facts.scale
        if given not in allowed or given not in get_args(Scale):
            raise ParameterError(
                f"scale is {shown(given)}: with this model's head it can be {', '.join(allowed)}",
                param="scale",
            )
        return given


def cannot(task: Task, facts: PoolingFacts | None, generates: bool) -> RequestError:
    """Names what the model can do instead."""
    can = ", ".join(tasks_of(generates, facts))
    return RequestError(f"this model cannot {task}: it can {can}", param="model", code="unsupported_task")


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
    """A query and a document for each score."""
    found = {}
    for param, given in (("query", query), ("documents", documents)):
        items = [given] if isinstance(given, str) else given
        if not isinstance(items, Sequence) or isinstance(items, bytes):
            raise PromptError(
                f"{param} is of type {type(given).__name__}: it must be a text, or a list of texts",
                param=param,
            )
        for index, item in enumerate(items):
            if not isinstance(item, str):
                raise PromptError(f"{param}[{index}] is {shown(item)}: it must be a text", param=param)
        found[param] = list(items)
    queries = found["query"] * (len(found["documents"]) if len(found["query"]) == 1 else 1)
    if len(queries) != len(found["documents"]):
        raise PromptError(
            f"there are {len(queries)} queries for {len(found['documents'])} documents: give one, or as many",
            param="query",
        )
    return list(zip(queries, found["documents"], strict=True))


def _cuts(truncate: bool, name: str, max_tokens: int | None) -> dict[str, Any]:
    """How long a text may be: fields of its group."""
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ParameterError(
            f"{name} is {shown(max_tokens)}: it must be an integer of at least 1", param=name
        )
    return {"truncate": truncate or max_tokens is not None, "max_tokens": max_tokens}
