"""Turns deltas of token ids into text, cut at stop strings, into parsed messages and outputs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from inflight.events import Delta, PositionLogprobs, RequestRecord, own_logprob
from inflight.frontend.agents.parser import MessageParser
from inflight.frontend.agents.source import (
    ArgumentsDelta,
    ContentDelta,
    ParsedMessage,
    ParserEvent,
    ToolCallBegun,
    ToolCallEnded,
    merge_deltas,
)
from inflight.frontend.text.detokenizer import IncrementalDetokenizer
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.outputs import (
    AssistantMessage,
    CompletionOutput,
    Logprobs,
    PackedLogprobs,
    RequestMetrics,
    RequestOutput,
    ToolCall,
)
from inflight.request import Request
from inflight.sampling_params import SamplingParams

# ---- stop strings ----

_ROOT = 0
_CODE_POINTS = 0x110000


class _Automaton:
    """An Aho-Corasick automaton that searches for all stop strings at once.

    Its state is the longest suffix of the text that is a prefix of some stop string. That suffix is exactly the text
    that must be held back, and keeping it is how a stop string that spans several tokens is found. Time is linear in
    the text, however many and long the stop strings are. One flat dict of edges is far smaller than one dict per state.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.edges: dict[int, int] = {}  # state * _CODE_POINTS + character -> state
        self.depth = [0]  # characters from the root
        self.fallback = [_ROOT]  # the state of the longest proper suffix
        self.match: list[str | None] = [None]  # the longest stop that ends in this state
        # Breadth first: a fallback is shorter than its state, so it is complete before it is needed.
        growing = [(stop, _ROOT) for stop in stops]
        level = 0
        while growing:
            growing = [(stop, self._grow(state, stop, level)) for stop, state in growing]
            level += 1
            growing = [(stop, state) for stop, state in growing if len(stop) > level]

    def _grow(self, parent: int, stop: str, level: int) -> int:
        """Return the state one character further along a stop string, creating it if needed."""
        character = ord(stop[level])
        key = parent * _CODE_POINTS + character
        state = self.edges.get(key)
        if state is None:
            fallback = _ROOT if parent == _ROOT else self.step(self.fallback[parent], character)
            state = self.edges[key] = len(self.depth)
            self.depth.append(level + 1)
            self.fallback.append(fallback)
            self.match.append(self.match[fallback])
        if len(stop) == level + 1:
            self.match[state] = stop
        return state

    def step(self, state: int, character: int) -> int:
        while True:
            following = self.edges.get(state * _CODE_POINTS + character)
            if following is not None:
                return following
            if state == _ROOT:
                return _ROOT
            state = self.fallback[state]


_automaton = lru_cache(maxsize=8)(_Automaton)  # shared by the outputs of one request


class StopStrings:
    """Cuts a text at the stop string that is completed first; if several end there, at the longest."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._automaton = _automaton(tuple(stops))
        self._include = include
        self._state = _ROOT
        self._pending = ""  # as long as the depth of the state
        self.matched: str | None = None  # the stop string at which the text ended

    def push(self, text: str) -> str:
        """Return the text that is safe to send, which is all but a possible start of a stop string."""
        if self.matched is not None:
            return ""
        automaton, state = self._automaton, self._state
        if not automaton.edges:  # there are no stops
            return text
        for index, character in enumerate(text):
            state = automaton.step(state, ord(character))
            stop = automaton.match[state]
            if stop is not None:
                return self._end(self._pending + text[: index + 1], stop)
        self._state = state
        text = self._pending + text
        safe = len(text) - automaton.depth[state]
        self._pending = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """Return the text that was held back, at the natural end of the output."""
        pending, self._pending, self._state = self._pending, "", _ROOT
        return pending

    def _end(self, text: str, stop: str) -> str:
        self.matched = stop
        self._pending = ""
        return text if self._include else text[: len(text) - len(stop)]


# ---- answers ----


class MessageReader:
    """The parsed answer to a conversation as it grows: reasoning, content and tool calls."""

    def __init__(self, parser: MessageParser, max_calls: int | None = None) -> None:
        """Tool calls beyond `max_calls` are dropped."""
        self.message = ParsedMessage()  # so far
        self.num_reasoning_tokens = 0  # including the markers around the reasoning
        self.marker_ids = parser.marker_ids  # special tokens that the parser needs to see
        self._parser, self._max_calls = parser, max_calls
        self._events: list[ParserEvent] = []
        self._ended = False

    def take(self) -> list[ParserEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events if len(events) < 2 else merge_deltas(events)

    def assistant_message(self) -> AssistantMessage:
        """The message so far."""
        message = self.message
        calls = tuple(ToolCall(call.id or "", call.name, call.arguments) for call in message.tool_calls)
        content = None if calls and not message.content else message.content
        return AssistantMessage(content, message.reasoning or None, calls)

    def feed(self, text: str, token_ids: Sequence[int]) -> None:
        """Parse the next tokens and the text that they complete."""
        was_reasoning = self._parser.in_reasoning
        self._add(self._parser.feed(text, token_ids))
        if was_reasoning or self._parser.in_reasoning:
            self.num_reasoning_tokens += len(token_ids)

    def finish(self, text: str = "") -> None:
        """Parse the text that was held back, and end the message. Further calls do nothing."""
        if not self._ended:
            self._ended = True
            self._add(self._parser.feed(text))
            self._add(self._parser.finish())

    def _add(self, events: list[ParserEvent]) -> None:
        for event in events:
            if isinstance(event, ToolCallBegun) and event.id is None:
                event = replace(event, id=f"call_{secrets.token_hex(12)}")
            if self._is_within_limit(event):
                self._events.append(event)
                self.message.add((event,))

    def _is_within_limit(self, event: ParserEvent) -> bool:
        if self._max_calls is None or not isinstance(event, ToolCallBegun | ArgumentsDelta | ToolCallEnded):
            return True
        return event.index < self._max_calls


class Answer:
    """One answer as it grows.

    Text and logprob objects are made only when they are read; text also when there are stop strings to find.
    """

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer | None, chat: ChatAnswers | None = None
    ) -> None:
        self.request = request
        self.output = CompletionOutput(index)
        self.record: RequestRecord = request.record
        self._params = params = request.params
        self._tokenizer = tokenizer
        self.reader: MessageReader | None = None  # for chats whose answers may have more than plain content
        if chat is not None and chat.make_parser is not None and params.detokenize:
            self.reader = MessageReader(chat.make_parser(), chat.max_calls)
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            prompt = request.token_ids[: request.num_prompt_tokens]
            shown = frozenset() if self.reader is None else self.reader.marker_ids
            self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, prompt, shown)
        self._stops = _stops_of(params)
        self._num_read = 0  # tokens that have been detokenized
        self._text = ""  # since the last call of `take_text`
        self.positions: list[PositionLogprobs] = []  # candidates for each token, as the engine sends them
        self._num_summed = 0  # tokens whose logprobs are in the sum
        self._stop_ids = request.stop_ids
        self._eos_ids = request.stop_ids.difference(params.stop_token_ids or ())
        if params.logprobs is not None:
            packed = PackedLogprobs(_text_of(tokenizer))
            self.positions = packed.positions  # type: ignore[assignment]  # only those of prompts may be None
            self.output.logprobs = packed  # type: ignore[assignment]  # reading it gives a list
            self.output.cumulative_logprob = 0.0

    def push(self, delta: Delta) -> bool:
        """Add a delta. Return True if a stop string ended the answer before the engine did."""
        output = self.output
        if output.finish_reason is not None:
            return False
        first = len(output.token_ids)
        output.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.positions += delta.logprobs
        if delta.finish_reason is not None:
            output.finish_reason, output.error = delta.finish_reason, delta.error
            if delta.stop_token_id not in self._eos_ids:
                output.stop_reason = delta.stop_token_id
        if not self._params.stop_strings:
            return False
        return self._find_stop(first, delta)

    def _find_stop(self, first: int, delta: Delta) -> bool:
        """Search token by token, so that the answer ends with the token that completed the stop string."""
        output = self.output
        last_end = len(output.token_ids) - self._hides_last()
        for end in range(first + 1, last_end + 1):
            self._read(end)
            if self._stops.matched is not None:
                self._cut(end)
                return delta.finish_reason is None
        return False

    def _cut(self, num_tokens: int) -> None:
        output = self.output
        del output.token_ids[num_tokens:]
        del self.positions[num_tokens:]
        output.finish_reason, output.stop_reason = "stop", self._stops.matched

    def _hides_last(self) -> bool:
        """Return whether the last token is a stop token, which is part of the ids but not of the text.

        It may arrive before the delta with the finish reason: some policies keep a finished request for a while.
        """
        ids, params = self.output.token_ids, self._params
        ends = len(ids) > params.min_tokens and ids[-1] in self._stop_ids
        return ends and not params.include_stop_str_in_output

    def _read(self, end: int) -> None:
        """Detokenize the tokens up to `end`."""
        if self._detokenizer is None or end <= self._num_read:
            return
        ids, self._num_read = self.output.token_ids[self._num_read : end], end
        # One by one where there may be reasoning, so that its tokens are counted exactly.
        for piece in (ids,) if self.reader is None else ([token_id] for token_id in ids):
            text = self._detokenizer.push(piece)
            text = self._pass(text) if end < self._params.min_tokens else self._stops.push(text)
            self._text += text
            if self.reader is not None:
                self.reader.feed(text, piece)

    def _pass(self, text: str) -> str:
        """Return text from before min_tokens, where a complete stop string is plain text.

        One that has only started is held back: it may be completed after min_tokens.
        """
        passed = ""
        for character in text:
            passed += self._stops.push(character)
            if self._stops.matched is not None:
                passed += "" if self._params.include_stop_str_in_output else self._stops.matched
                self._stops = _stops_of(self._params)
        return passed

    def complete(self) -> None:
        """Bring the output up to date with the tokens; at the end, add the text that was held back."""
        self._sum_logprobs()
        output = self.output
        pending = ""
        if self._detokenizer is not None and self._stops.matched is None:
            self._read(len(output.token_ids) - self._hides_last())
            if output.finish_reason is not None:
                pending = self._stops.push(self._detokenizer.flush())
                if self._stops.matched is None:
                    pending += self._stops.flush()
                self._text += pending
                self._detokenizer = None
        if self.reader is not None and output.finish_reason is not None:
            self.reader.finish(pending)

    def result(self) -> CompletionOutput:
        """Return the output with all text so far, which `take_text` no longer returns."""
        self.output.text += self.take_text()
        return self.output

    def message(self) -> AssistantMessage:
        """Return the answer to a conversation, as of the last `result`."""
        return AssistantMessage(self.output.text) if self.reader is None else self.reader.assistant_message()

    def take_text(self) -> str:
        """Return the text since the last call and forget it, so that a stream does not keep a growing copy."""
        self.complete()
        text, self._text = self._text, ""
        return text

    def take_events(self) -> list[ParserEvent]:
        """Return what is new since the last call, as the events of a parser also for plain text."""
        if self.reader is None:
            text = self.take_text()
            return [ContentDelta(text)] if text else []
        self.complete()
        return self.reader.take()

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self.reader is None else self.reader.num_reasoning_tokens

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended. "tool_calls" only if the last call is complete."""
        reason, calls = self.output.finish_reason, self.reader and self.reader.message.tool_calls
        return "tool_calls" if reason == "stop" and calls and calls[-1].complete else reason

    def _sum_logprobs(self) -> None:
        output, num = self.output, len(self.positions)
        if output.cumulative_logprob is not None and self._num_summed < num:
            for position in self.positions[self._num_summed :]:  # one by one: sum() would round differently
                output.cumulative_logprob += own_logprob(position)
            self._num_summed = num


def _stops_of(params: SamplingParams) -> StopStrings:
    return StopStrings(params.stop_strings, params.include_stop_str_in_output)


def _text_of(tokenizer: Tokenizer | None) -> Callable[[int], str | None]:
    return (lambda _: None) if tokenizer is None else tokenizer.text_of


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """How the answers to a conversation are parsed."""

    make_parser: Callable[[], MessageParser] | None  # None: the whole answer is content
    max_calls: int | None = None


class OutputProcessor:
    """Collects the answers to one prompt, with one request for each."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: list[Request],
        tokenizer: Tokenizer | None,
        chat: ChatAnswers | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = requests[0].token_ids[: requests[0].num_prompt_tokens]
        self._tokenizer = tokenizer
        self._prompt_logprobs: PackedLogprobs | None = None  # None until they are computed
        if requests[0].params.prompt_logprobs is not None and len(self.prompt_token_ids) == 1:
            self._take_prompt([None])  # the first token has no logprob, so there will be no delta
        self._is_chat = chat is not None
        self._answers = {
            request.request_id: Answer(index, request, tokenizer, chat)
            for index, request in enumerate(requests)
        }

    @property
    def answers(self) -> list[Answer]:
        return list(self._answers.values())

    @property
    def finished(self) -> bool:
        return all(answer.output.finish_reason is not None for answer in self._answers.values())

    def excerpt(self, length: int) -> str:
        """Return the beginning and the end of the prompt's text, in at most about `length` characters."""
        text = self.prompt
        if text is None:
            ids, num_shown = self.prompt_token_ids, length // 4  # most tokens have fewer characters than four
            if self._tokenizer is None:
                return ""
            shown = ids if len(ids) <= 2 * num_shown else [*ids[:num_shown], *ids[-num_shown:]]
            text = self._tokenizer.decode(shown, skip_special_tokens=False)
        half = length // 2
        return text if len(text) <= length else f"{text[:half]} … {text[-half:]}"

    def push(self, delta: Delta) -> bool:
        """Add a delta of one answer. Return True if a stop string ended it, so that its request must be aborted."""
        if delta.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._take_prompt(delta.prompt_logprobs)
        answer = self._answers[delta.request_id]
        if delta.record is not None:
            answer.record = delta.record
        return answer.push(delta)

    def _take_prompt(self, positions: list[PositionLogprobs | None]) -> None:
        self._prompt_logprobs = PackedLogprobs(_text_of(self._tokenizer))
        self._prompt_logprobs.positions += positions

    @property
    def prompt_logprobs(self) -> list[Logprobs | None] | None:
        """None until they are computed. The first read takes long if the prompt is long."""
        return None if self._prompt_logprobs is None else self._prompt_logprobs.read()

    @property
    def prompt_positions(self) -> list[PositionLogprobs | None] | None:
        """Candidates for each prompt token, as the engine sends them; None until they are computed."""
        return None if self._prompt_logprobs is None else self._prompt_logprobs.positions

    def output(self) -> RequestOutput:
        """Return all answers so far. Later deltas change the returned object."""
        answers = self.answers
        outputs = [answer.result() for answer in answers]
        for answer, output in zip(answers, outputs, strict=True):
            if self._is_chat:
                output.message = answer.message()
        records = [answer.record for answer in answers]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            prompt_logprobs=self._prompt_logprobs,  # type: ignore[arg-type]  # reading it gives a list
            finished=self.finished,
            num_cached_tokens=records[0].num_cached_tokens,
            metrics=_metrics(records),
        )


def _metrics(records: list[RequestRecord]) -> RequestMetrics:
    """Combine the records of all answers: the earliest start and the latest end."""

    def known(name: str) -> list[float]:
        return [value for record in records if (value := getattr(record, name)) is not None]

    return RequestMetrics(
        arrival_time=min(record.arrived_at for record in records),
        first_scheduled_time=min(known("admitted_at"), default=None),
        first_token_time=min(known("first_token_at"), default=None),
        last_token_time=max(known("last_token_at"), default=None),
        finished_time=max(known("finished_at"), default=None),
        num_preemptions=sum(record.num_preemptions for record in records),
    )
