"""The text side of a model: tokenizer, validation, chat template and parsers, in front of a local or remote engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from inflight.checkpoint.builtin import checkpoint_folder
from inflight.checkpoint.checkpoint import locate_checkpoint
from inflight.config import EngineConfig, ModelConfig
from inflight.engine.client import ModelFacts
from inflight.errors import ConfigError, ParameterError, shown
from inflight.frontend.agents.answer_grammar import NamedTool, answer_grammar
from inflight.frontend.agents.parser import MessageParser
from inflight.frontend.chat import ChatFormats, ChatRequest, check_parsers, template_messages, template_tools
from inflight.frontend.input_processor import InputProcessor, Prompt
from inflight.frontend.output_processor import ChatAnswers, OutputProcessor
from inflight.frontend.scoring import ScoringProcessor, unsupported_task
from inflight.frontend.scoring_inputs import ScoringInputs
from inflight.frontend.text.chat import encode_chat
from inflight.frontend.text.chat_template import ChatTemplate, check_messages
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.request import DEFAULT_CONTEXT, RequestContext
from inflight.sampling_params import SamplingParams
from inflight.scoring import PoolingFacts, Task


@dataclass
class Frontend:
    """Turns prompts into requests and deltas into outputs. It needs the model's facts, but not its weights."""

    config: EngineConfig
    tokenizer: Tokenizer | None
    input_processor: InputProcessor
    default_params: dict[str, Any]  # from the checkpoint's generation_config.json
    generates: bool = field(default=True, kw_only=True)  # False: the model only embeds, classifies or scores
    pooling: PoolingFacts | None = field(default=None, kw_only=True)  # if the model has such a head
    _detecting: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @classmethod
    def from_config(cls, config: EngineConfig, facts: ModelFacts, on_this_machine: bool = True) -> Frontend:
        """Create the frontend of an engine in another process, on this machine or on another one."""
        check_parsers(config.model)
        tokenizer = None
        if facts.tokenizer_folder is not None:
            folder = Path(facts.tokenizer_folder)
            if not on_this_machine:
                folder = _local_tokenizer(config.model, folder)
            tokenizer = Tokenizer.load(folder, config.model.chat_template)
        input_processor = InputProcessor.create(
            tokenizer, facts.vocab_size, facts.max_model_len, facts.eos_token_ids, config.model.seed
        )
        return cls(
            config,
            tokenizer,
            input_processor,
            dict(facts.default_params),
            generates=facts.generates,
            pooling=facts.pooling,
        )

    @property
    def max_model_len(self) -> int:
        return self.input_processor.max_model_len

    def scoring_processor(self, task: Task) -> ScoringProcessor:
        """Return the processor for scoring calls. Raises RequestError if the model only generates."""
        if self.pooling is None:
            raise unsupported_task(task, None, self.generates)
        return self._scoring_processor

    @cached_property
    def _scoring_processor(self) -> ScoringProcessor:
        assert self.pooling is not None
        vocab_size = self.input_processor.vocab_size
        inputs = ScoringInputs(self.pooling, self.tokenizer, vocab_size, self.max_model_len)
        return ScoringProcessor(self.pooling, inputs, self.generates)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        if self.tokenizer is None:
            raise ConfigError("chat needs a tokenizer, and this engine has none")
        return ChatTemplate(self.tokenizer.chat_template, self.tokenizer.special_tokens)

    @property
    def chat_formats(self) -> ChatFormats:
        """How the model writes tool calls and reasoning. The first use detects it and is too slow for an event loop."""
        with self._detecting:  # once, though many threads may ask at the same time
            return self._chat_formats

    @cached_property
    def _chat_formats(self) -> ChatFormats:
        return ChatFormats.from_config(self.config.model, self.chat_template, self.tokenizer)

    def encode_chat(
        self, chat: ChatRequest, check_size: Callable[[int], None] | None = None
    ) -> tuple[str, list[int]]:
        """Return a conversation's prompt as text and token ids.

        Special tokens come from the template only: those spelled in messages and tools are plain text. `check_size`
        gets the number of characters before they are tokenized.
        """
        template = self.chat_template
        assert self.tokenizer is not None
        check_messages(chat.messages)
        return encode_chat(
            template,
            self.tokenizer,
            template_messages(chat.messages, self.chat_formats.style),
            tools=template_tools(chat.offered_tools) or None,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            kwargs={**template.effort_kwargs(chat.reasoning_effort), **chat.template_kwargs},
            check_size=check_size,
        )

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        text: str | None = None,
        task: str = "generate",
    ) -> OutputProcessor:
        """Check a prompt and make a request for each of its answers. Its constraint is checked by `validate`.

        `text` is the text of a prompt given as token ids, if known.
        """
        if not self.generates:
            raise unsupported_task("generate", self.pooling, generates=False)
        prompt_text, requests = self.input_processor.requests(request_id, prompt, params, context, task)
        return OutputProcessor(request_id, prompt_text if text is None else text, requests, self.tokenizer)

    def prepare_chat(
        self,
        request_id: str,
        chat: ChatRequest,
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
    ) -> OutputProcessor:
        """Do the same for a conversation, whose answers are parsed for tool calls and reasoning.

        This renders the chat template, which is too slow for an event loop.
        """
        if not self.generates:
            raise unsupported_task("generate", self.pooling, generates=False)
        self._check_tools(chat)
        text, token_ids = self.encode_chat(chat, self.input_processor.check_characters)
        self.input_processor.check_length(len(token_ids))  # before its tools become a grammar
        formats, tools, content = self.chat_formats, chat.offered_tools, params.structured_outputs
        tool_format, reasoning_format = formats.tools if tools else None, formats.reasoning_after(text)
        constraint = answer_grammar(
            tool_format,
            reasoning_format,
            tools=tools,
            tool_choice=chat.tool_choice,
            parallel=chat.parallel_tool_calls,
            content=content,
            prompt=text,
            max_reasoning_tokens=None if reasoning_format is None else self._reasoning_budget(chat),
            tokenizer=self.tokenizer,
        )
        forbidden_ids = formats.forbidden_ids(chat, params)
        if constraint is not content:
            params = replace(params, structured_outputs=constraint)
        _, requests = self.input_processor.requests(
            request_id, token_ids, params, context, forbidden_ids=forbidden_ids
        )
        make_parser = None
        if tool_format is not None or formats.reasoning is not None:
            make_parser = partial(
                MessageParser,
                tool_format,
                formats.reasoning,
                tools=tools,
                tokenizer=self.tokenizer,
                prompt=text,
                shaped_content=content is not None,
            )
        answers = ChatAnswers(make_parser, None if chat.parallel_tool_calls else 1)
        return OutputProcessor(request_id, text, requests, self.tokenizer, answers)

    def _reasoning_budget(self, chat: ChatRequest) -> int | None:
        """Return the limit of reasoning tokens: 0 if there is to be none and the template has no switch for that."""
        if chat.reasoning_effort == "none" and not self.chat_template.effort_kwargs("none"):
            return 0
        budget = chat.max_reasoning_tokens
        # A budget beyond the context length is no limit, and grammars cannot count that far.
        return budget if budget is None or budget < self.max_model_len else None

    def _check_tools(self, chat: ChatRequest) -> None:
        """Raise ParameterError for tools that the model would not see, or whose calls could not be parsed."""
        choice, names = chat.tool_choice, [tool["function"]["name"] for tool in chat.tools]
        if isinstance(choice, NamedTool) and choice.name not in names:
            raise ParameterError(
                f"tool_choice names {shown(choice.name)}: no tool has this name", param="tool_choice"
            )
        if choice == "required" and not names:
            raise ParameterError("tool_choice is required, but no tools are given", param="tool_choice")
        if not chat.offered_tools:
            return
        if not self.chat_formats.shows_tools:
            raise ParameterError(
                "tools are given, but this model's chat template does not support tools",
                param="tools",
                code="tools_unavailable",
            )
        if self.chat_formats.tools is None:
            raise ParameterError(
                "tools are given, but the format of this model's tool calls is unknown: start with --tool-call-parser, "
                "or set tool_choice to none",
                param="tools",
                code="tools_unavailable",
            )

    def warm_up(self) -> None:
        """Prepare for constrained requests, so that the first one does not wait up to a second."""
        if self.generates:
            self.input_processor.grammars.warm_up()

    def validate(self, prompt: OutputProcessor) -> None:
        """Check the constraint of a prepared prompt, which must be done before it reaches an engine.

        Raises ParameterError, or QueueFullError if the tenant has too many new constraints.
        """
        request = prompt.answers[0].request
        if request.params.structured_outputs is not None:
            self.input_processor.grammars.validate(request.params.structured_outputs, request.tenant)

    async def validate_async(self, prompt: OutputProcessor) -> None:
        """Do the same without blocking the event loop. Cancelling the task stops the check."""
        request = prompt.answers[0].request
        if request.params.structured_outputs is not None:
            grammars = self.input_processor.grammars
            await grammars.validate_async(request.params.structured_outputs, request.tenant)

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.default_params)

    def close(self) -> None:
        """Stop the processes that render templates and check grammars."""
        self.input_processor.grammars.close()
        if "chat_template" in self.__dict__:
            self.chat_template.close()


def _local_tokenizer(model: ModelConfig, folder: Path) -> Path:
    """Return the folder or GGUF file on this machine with the tokenizer that is in `folder` on the engine's machine."""
    name = model.tokenizer or model.model
    if name is None:
        return checkpoint_folder()
    # The hub's cache names a snapshot after its commit: a branch may have moved since the engine downloaded it.
    snapshots = [path.name for path in (folder, *folder.parents) if path.parent.name == "snapshots"]
    revision = snapshots[0] if snapshots else model.revision
    return locate_checkpoint(name, revision, model.download_dir, weights=False)
