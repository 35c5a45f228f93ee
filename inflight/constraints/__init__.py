"""Constrained generation: from a user's constraint to masks of the tokens that may come next.

    StructuredOutputs ── grammars.py ──► Lark ── compiler.py ──► Grammar ──► Matcher, one per request
                                          └── validator.py: tried in a sandboxed process first

The grammar engine is llguidance, which is imported when the first constraint is compiled.
"""

from inflight.constraints.answer_rules import CONTENT, AnswerRules, RuleSchema
from inflight.constraints.compiler import Grammar, GrammarCompiler
from inflight.constraints.grammars import literal
from inflight.constraints.input_lark import bare_input, json_quoted
from inflight.constraints.matcher import MaskBatch, MaskFiller, Matcher
from inflight.constraints.native_matcher import UNKNOWN
from inflight.constraints.schema import is_annotation, without_annotations
from inflight.constraints.validator import GrammarValidator
from inflight.constraints.vocabulary import Vocabulary

__all__ = [
    "CONTENT",
    "UNKNOWN",
    "AnswerRules",
    "Grammar",
    "GrammarCompiler",
    "GrammarValidator",
    "MaskBatch",
    "MaskFiller",
    "Matcher",
    "RuleSchema",
    "Vocabulary",
    "bare_input",
    "is_annotation",
    "json_quoted",
    "literal",
    "without_annotations",
]
