"""Deltas of token ids become text and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.agents import MessageParser
from inflight.events import Delta, PositionLogprobs, RequestRecord, own_logprob
from inflight.frontend.message_reader import MessageReader
from inflight.outputs import (
    AssistantMessage,
    CompletionOutput,
    Logprobs,
    PackedLogprobs,
    RequestMetrics,
    RequestOutput,
)
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.text import IncrementalDetokenizer, StopStrings, Tokenizer


class Answer:
    """One answer as it grows. Text, and objects for candidates, are made when someone looks; text also when stop
    strings have to be found in it."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer | None, chat: ChatAnswers | None = None
    ) -> None:
        self.request = request
        self.output = CompletionOutput(index)
        self.record: RequestRecord = request.record
        self._params = params = request.params
        self._tokenizer = tokenizer
        self.reader: MessageReader | None = None  # of chats in which there may be more than plain content
        if chat is not None and chat.make_parser is not None and params.detokenize:
            self.reader = MessageReader(chat.make_parser(), self.output, self.complete, chat.max_calls)
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            prompt = request.token_ids[: request.num_prompt_tokens]
            shown = frozenset() if self.reader is None else self.reader.marker_ids
            self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, prompt, shown)
        self._stops = _stops_of(params)
        self._num_read = 0  # tokens whose text has been made
        self.positions: list[PositionLogprobs] = []  # candidates for each token, as the engine sends them
        self._num_summed = 0  # tokens whose logprobs are part of the sum
        self._stop_ids = request.stop_ids
        self._eos_ids = request.stop_ids.difference(params.stop_token_ids or ())
        if params.logprobs is not None:
            packed = PackedLogprobs(_text_of(tokenizer))
            self.positions = packed.positions  # type: ignore[assignment]  # only those of a prompt may be None
            self.output.logprobs = packed  # type: ignore[assignment]  # whoever reads it gets a list
            self.output.cumulative_logprob = 0.0

    def push(self, delta: Delta) -> bool:
        """Take in a delta. True when a stop string ended the answer before the engine did."""
        output = self.output
        if output.finished:
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
        """Look token by token, so that the answer ends with the token that completed the stop string."""
        output = self.output
        last = len(output.token_ids) - self._hides_last()
        for end in range(first + 1, last + 1):
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
        """The token that ends the answer is part of its ids, not of its text. It may come before the delta that says
        so: some policies keep a request for a while."""
        ids, params = self.output.token_ids, self._params
        ends = len(ids) > params.min_tokens and ids[-1] in self._stop_ids
        return ends and not params.include_stop_str_in_output

    def _read(self, end: int) -> None:
        """Make the text of the tokens up to `end`."""
        if self._detokenizer is None or end <= self._num_read:
            return
        ids, self._num_read = self.output.token_ids[self._num_read : end], end
        for piece in (ids,) if self.reader is None else self.reader.pieces(ids):
            text = self._detokenizer.push(piece)
            text = self._pass(text) if end < self._params.min_tokens else self._stops.push(text)
            self.output.text += text
            if self.reader is not None:
                self.reader.feed(text, piece)

    def _pass(self, text: str) -> str:
        """Before min_tokens nothing stops an answer: a stop string complete so early is only text. One that has
        begun may still be completed in time, and is held back."""
        passed = ""
        for character in text:
            passed += self._stops.push(character)
            if self._stops.matched is not None:
                passed += "" if self._params.include_stop_str_in_output else self._stops.matched
                self._stops = _stops_of(self._params)
        return passed

    def complete(self) -> None:
        """Bring the output up to date with the tokens; at the end, with all text that was held back."""
        self._sum_logprobs()
        output = self.output
        held = ""
        if self._detokenizer is not None and self._stops.matched is None:
            self._read(len(output.token_ids) - self._hides_last())
            if output.finished:
                held = self._stops.push(self._detokenizer.flush())
                if self._stops.matched is None:
                    held += self._stops.flush()
                output.text += held
                self._detokenizer = None
        if self.reader is not None and output.finished:
            self.reader.finish(held)

    def message(self) -> AssistantMessage:
        """The answer to a conversation, as far as it is."""
        return AssistantMessage(self.output.text) if self.reader is None else self.reader.assistant_message()

    def take_text(self) -> str:
        """The text since it was last taken. Whoever passes it on at once need not keep a growing copy."""
        self.complete()
        text, self.output.text = self.output.text, ""
        return text

    def _sum_logprobs(self) -> None:
        output, num = self.output, len(self.positions)
        if output.cumulative_logprob is not None and self._num_summed < num:
            for position in self.positions[self._num_summed :]:  # one by one: sum() would round otherwise
                output.cumulative_logprob += own_logprob(position)
            self._num_summed = num


def _stops_of(params: SamplingParams) -> StopStrings:
    return StopStrings(params.stop_strings, params.include_stop_str_in_output)


def _text_of(tokenizer: Tokenizer | None) -> Callable[[int], str | None]:
    return (lambda _: None) if tokenizer is None else tokenizer.text_of


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """How the answers to a conversation are read."""

    make_parser: Callable[[], MessageParser] | None  # None: all of an answer is content
    max_calls: int | None = None


class OutputProcessor:
    """Collects the answers to one prompt: there is one request for each."""

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
        self._prompt_logprobs: PackedLogprobs | None = None  # once they are computed
        if requests[0].params.prompt_logprobs is not None and len(self.prompt_token_ids) == 1:
            self._take_prompt([None])  # nothing predicts the first token, so no delta will bring any
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
        return all(answer.output.finished for answer in self._answers.values())

    def push(self, delta: Delta) -> bool:
        """Take in a delta of one answer. True when its request must be aborted: a stop string ended it."""
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
        """None before they are computed. Takes long when it is first read, where the prompt is long."""
        return None if self._prompt_logprobs is None else self._prompt_logprobs.read()

    @property
    def prompt_positions(self) -> list[PositionLogprobs | None] | None:
        """Candidates for each token of the prompt, as the engine sends them; None before they are computed."""
        return None if self._prompt_logprobs is None else self._prompt_logprobs.positions

    def output(self) -> RequestOutput:
        """All answers as far as they are. Later deltas change it: take what you keep."""
        answers = self.answers
        for answer in answers:
            answer.complete()
            if self._is_chat:
                answer.output.message = answer.message()
        records = [answer.record for answer in answers]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[answer.output for answer in answers],
            prompt_logprobs=self._prompt_logprobs,  # type: ignore[arg-type]  # whoever reads it gets a list
            finished=self.finished,
            num_cached_tokens=records[0].num_cached_tokens,
            metrics=RequestMetrics.of(records),
        )
