"""The tokenizer that users get, with the methods of transformers' tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from inflight.errors import ParameterError
from inflight.frontend.chat import ChatRequest
from inflight.frontend.frontend import Frontend
from inflight.frontend.text.tokenizer import Tokenizer


class TokenizedText(dict[str, Any]):
    """`input_ids` and `attention_mask`, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"a tokenized text has no {name}", name=name, obj=self)
        return self[name]


class ChatTokenizer:
    """Encodes and decodes text as the engine does. Other attributes are those of `tokenizer`."""

    def __init__(self, frontend: Frontend, tokenizer: Tokenizer) -> None:
        self._frontend = frontend
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return self.tokenizer.vocab_size

    # ---- text ----

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens, **options)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = True) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> TokenizedText:
        """Return the ids of a text, or of each of several."""
        ids: Any = self.tokenizer.encode_batch([text] if isinstance(text, str) else text, add_special_tokens)
        mask: Any = [[1] * len(item) for item in ids]
        if isinstance(text, str):
            ids, mask = ids[0], mask[0]
        return TokenizedText(input_ids=ids, attention_mask=mask)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> Any:
        """Return a conversation's prompt as `LLM.chat` makes it: token ids, or text if not `tokenize`.

        Special tokens spelled in messages are plain text.
        """
        if chat_template is not None:
            raise ParameterError.of_value(
                "chat_template", chat_template, "it must be None; templates come with the checkpoint"
            )
        if conversation and isinstance(conversation[0], Sequence):  # several conversations
            options: Any = {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "tokenize": tokenize,
            }
            return [
                self.apply_chat_template(one, tools, **options, **template_kwargs) for one in conversation
            ]
        chat = ChatRequest.from_messages(
            conversation,
            tools=tools,
            chat_template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        text, ids = self._frontend.encode_chat(chat)
        if return_dict:
            return TokenizedText(input_ids=ids, attention_mask=[1] * len(ids))
        return ids if tokenize else text

    # ---- single tokens ----

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]: ...
    def convert_ids_to_tokens(
        self, ids: int | Sequence[int], skip_special_tokens: bool = False
    ) -> str | list[str]:
        if isinstance(ids, int):
            return self.tokenizer.token(ids)
        hidden = self.tokenizer.special_ids if skip_special_tokens else frozenset()
        return [self.tokenizer.token(token_id) for token_id in ids if token_id not in hidden]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the ids of tokens; None for strings that are not tokens."""
        if isinstance(tokens, str):
            return self.tokenizer.token_id(tokens)
        return [self.tokenizer.token_id(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        ids = [token_id for token in tokens if (token_id := self.tokenizer.token_id(token)) is not None]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        vocab = {self.tokenizer.token(token_id): token_id for token_id in range(self.tokenizer.vocab_size)}
        vocab.pop("", None)  # unused ids
        return vocab

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.tokenizer.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [self.tokenizer.token(token_id) for token_id in self.all_special_ids]

    @property
    def eos_token(self) -> str | None:
        return self.tokenizer.special_tokens.get("eos_token")

    @property
    def bos_token(self) -> str | None:
        return self.tokenizer.special_tokens.get("bos_token")
