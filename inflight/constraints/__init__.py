"""Constrained generation: from a user's constraint to masks of the tokens that may come next.

    StructuredOutputs ── grammars.py ──► Lark ── compiler.py ──► Grammar ──► Matcher, one per request
                                          └── validator.py: tried in a sandboxed process first

The grammar engine is llguidance, which is imported when the first constraint is compiled.
"""
