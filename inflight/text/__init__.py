"""Conversion between text and token ids: tokenizer, detokenizer, chat templates and stop strings. No tensors."""

from inflight.text.chat import encode_chat
from inflight.text.chat_template import ChatTemplate, RenderLimits, check_messages
from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.stop_strings import StopStrings, bad_word_ids
from inflight.text.tokenizer import TextFrame, Tokenizer, check_text

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "RenderLimits",
    "StopStrings",
    "TextFrame",
    "Tokenizer",
    "bad_word_ids",
    "check_messages",
    "check_text",
    "encode_chat",
]
