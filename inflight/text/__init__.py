"""Conversion between text and token ids: tokenizer, detokenizer, chat templates and stop strings. No tensors."""

from inflight.text.chat import ChatTemplate, check_messages, encode_chat
from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.render import RenderLimits
from inflight.text.stops import StopStrings, bad_word_ids
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
