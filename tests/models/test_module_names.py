"""Matching of module names agrees with Python's `re` where that one ends, and ends where it does not."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import ModelError
from inflight.models.module_names import MAX_STEPS, ModuleNames

MODULES = [
    "lm_head",
    "model.embed_tokens",
    "model.vision_tower.blocks.0.attn.qkv",
    *(
        f"model.layers.{layer}.{module}"
        for layer in (0, 1, 12, 40)
        for module in (
            "self_attn.q_proj",
            "self_attn.o_proj",
            "mlp.gate",
            "mlp.gate_proj",
            "mlp.experts.3.down_proj",
            "mlp.shared_experts.up_proj",
            "linear_attn.in_proj_ba",
        )
    ),
]
PUBLISHED = [
    ".*lm_head",
    ".*mlp.gate$",
    ".*self_attn.(q|k|v)_proj$",
    r"model\.layers\.\d+\.mlp\.experts\.\d+\.down_proj",
    "vision_tower.*",
    "model.vision_tower.*",
    r".*mlp\.(gate|up|gate_up|down)_proj.*",
    ".*shared_experts.*",
    r"^(?!.*(mlp\.gate|lm_head)).*$",
    r".*\.layers\.(?:1[0-5]|4\d)\..*",
    r".*\.(0|12)\.(?!mlp).*",
    r"model.layers.[0-9]*.linear_attn.in_proj_(b|a|ba)",
    r"(?:model\.)?layers\.\d{1,2}?\.self_attn\b",
]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_match_as_in_re(pattern: str) -> None:
    matches = ModuleNames("config").pattern(pattern)
    assert [matches(module) for module in MODULES] == [bool(re.match(pattern, module)) for module in MODULES]


ATOMS = [
    "a",
    "b",
    ".",
    r"\.",
    r"\d",
    r"\W",
    r"\S",
    "[ab]",
    "[^a]",
    r"[^\d-]",
    "[a-b1]",
    "^",
    "$",
    r"\b",
    r"\Z",
]
REPEATS = ["*", "+", "?", "*?", "??", "{2}", "{1,3}", "{2,}?"]
EXPRESSIONS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(REPEATS)).map("({0[0]}){0[1]}".format),
        inner.map("(?={})".format),
        inner.map("(?!{})".format),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, st.text("ab.1-\n", min_size=1, max_size=7))
def test_any_expression_matches_as_in_re(pattern: str, name: str) -> None:
    assert ModuleNames("config").pattern(pattern)(name) == bool(re.match(pattern, name))


@pytest.mark.parametrize(
    "pattern",
    [
        ".?" * 40 + "x",
        "(.|.)" * 40 + "x",
        "(.|.){40}x",
        "(.*)*x",
        "((((.+)+)+)+)+x",
        "(?:a?){100000}" * 20 + "x",
        ".*" * 100 + "x",
        "(?:" * 30 + "a?b?c?" + "){9}" * 30 + "x",
        "(?!" * 30 + ".*x" + ")" * 30 + "y",
    ],
)
def test_expression_that_would_backtrack_forever_ends(pattern: str) -> None:
    names = ModuleNames("config")
    assert not names.pattern(pattern)("model.layers.10.self_attn.q_proj")
    assert names._steps_left > MAX_STEPS // 2


def test_expressions_of_a_config_share_a_limit() -> None:
    names = ModuleNames("the config")
    first, second = (names.pattern(".*" * 1000 + ending) for ending in "ab")
    names._steps_left = 20_000
    with pytest.raises(ModelError, match=r"^the lists and regular expressions in the config take too long"):
        any(first(f"{index}.x") or second(f"{index}.x") for index in range(20))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("[", r"'\[' in the config is not a regular expression: unterminated"),
        ("(" * 2000 + ")" * 2000, "is not a regular expression"),
        ("a" * 5000, "has 5000 characters: at most 4096 are allowed"),
        (r"(a)\1", "has groupref, which is not supported"),
        ("(?<=a)b", "has look-behind, which is not supported"),
        ("(?>a*)b", "has atomic group, which is not supported"),
        ("(?i)A", "has flags, such as"),
        ("a(?i:A)", "has flags, which is not supported"),
    ],
)
def test_unsupported_expression_is_rejected_in_one_line(pattern: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as rejected:
        ModuleNames("the config").pattern(pattern)
    assert "\n" not in str(rejected.value)


def test_long_lists_count_for_the_limit() -> None:
    names = ModuleNames("the config")
    listed = names.some(["a"] * 1_000_000, lambda module, name: name in module)
    assert listed("a")
    with pytest.raises(ModelError, match="take too long"):
        any(not listed("a") for _ in range(MAX_STEPS // 1_000_000))


def test_names_are_found_within_modules() -> None:
    listed = ModuleNames("config").within(["mlp.gate", "model.layers.1", "layers.*.linear_attn", "lm_head"])
    found = [module for module in MODULES if listed(module)]
    assert found == [
        module
        for module in MODULES
        if module == "lm_head"
        or module.endswith("mlp.gate")
        or module.startswith("model.layers.1.")
        or "linear_attn" in module
    ]
