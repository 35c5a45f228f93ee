"""/tokenize and /detokenize."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inflight.server.openai.schemas import Messages, TemplateArguments, Tools
from inflight.server.schemas.common import Body, Items, Unset, missing


class TokenizeBody(Body):
    """Either a prompt, as completions read it, or messages, as chats do."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="For a prompt; true unless told otherwise.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_token_strs: bool | None = None

    chat_template: Unset = missing("templates come with the checkpoint, never with a request")
    mm_processor_kwargs: Unset = missing("only text is read")

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Items[int]


class DetokenizedText(BaseModel):
    prompt: str
