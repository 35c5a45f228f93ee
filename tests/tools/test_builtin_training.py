"""Tokenizer, model, data order, export: what is trained is what transformers loads."""

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.builtin import dataset, sums, train, train_data
from tools.builtin.chat_format import END_OF_TEXT, IM_END, IM_START, SPECIAL_TOKENS
from tools.builtin.corpus import documents
from tools.builtin.examples import Example
from tools.builtin.export import export, load
from tools.builtin.model import TINY, Decoder, Shape
from tools.builtin.sample import complete
from tools.builtin.tokenizer import token_id


@cache
def tokenizer() -> Tokenizer:
    return dataset.make_tokenizer(seed=0, documents_used=300)


def plan(**changes: object) -> train.Plan:
    values: dict[str, object] = {
        "seconds": 60.0,
        "steps": 10,
        "rows": 2,
        "length": 32,
        "long_length": 64,
        "long_every": 3,
        "learning_rate": 1e-2,
        "seed": 0,
    }
    return train.Plan(**(values | changes))  # type: ignore[arg-type]


def test_special_tokens_come_first_and_stay_whole() -> None:
    assert [token_id(tokenizer(), token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer().encode(f"{IM_START}user").ids[0] == 1
    with pytest.raises(ValueError, match="no token 'missing'"):
        token_id(tokenizer(), "missing")


def test_tokenizer_training_is_deterministic() -> None:
    assert dataset.make_tokenizer(seed=0, documents_used=300).to_str() == tokenizer().to_str()


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text).ids, skip_special_tokens=False) == text


def test_shipped_model_is_small_enough_for_the_repository() -> None:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in Decoder(Shape()).parameters())
    assert 2 * size < 13_500_000


def test_exported_checkpoint_has_equal_logits_in_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder(TINY)
    with torch.no_grad():
        for parameter in model.parameters():  # norms away from one, so that a swapped norm would show
            parameter.add_(0.1 * torch.randn_like(parameter))
    export(model, tokenizer(), tmp_path, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, TINY.vocab_size, (2, 70))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_exported_tokenizer_and_chat_template_match_the_training_text(tmp_path: Path) -> None:
    export(Decoder(TINY), tokenizer(), tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    example = Example("chat", ("Hi", "Hello!", "Who are you?", "A small model."), system="Be kind.")
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [
        {"role": role, "content": text}
        for role, text in zip(roles, (example.system, *example.turns), strict=True)
    ]
    assert loaded.apply_chat_template(messages, tokenize=False) + END_OF_TEXT == example.text
    asked = loaded.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert asked == example.prompt
    assert loaded(example.text).input_ids == tokenizer().encode(example.text).ids
    assert loaded.eos_token == IM_END
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=20, max_size=60),
    length=st.integers(4, 30),
    skip=st.integers(0, 9),
)
def test_rows_start_at_documents_and_cover_all_of_them(lengths: list[int], length: int, skip: int) -> None:
    ids = np.concatenate([[1] * (n - 1) + [0] for n in lengths]).astype(np.uint16)
    if len(ids) < length + 1:
        return
    begins = [0, *np.cumsum(lengths)[:-1].tolist()]
    rows = train_data.row_starts(ids, 0, length, skip).tolist()
    assert set(rows) <= set(begins)
    assert rows == sorted(set(rows))
    assert all(row + length + 1 <= len(ids) for row in rows)
    # Between the first and the last row, every document that fits in a row is whole in one of them.
    for begin, size in zip(begins, lengths, strict=True):
        if rows[0] <= begin < rows[-1] and size <= length:
            assert any(row <= begin and begin + size <= row + length + 1 for row in rows)


def test_generated_arrays_contain_the_documents(tmp_path: Path) -> None:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    counts = dataset.generate(
        tmp_path, count=30, num_tool_chats=2, num_easy=2, seed=3, processes=1, seconds=60
    )
    arrays = {name: np.load(tmp_path / f"{name}.npy") for name in dataset.ARRAYS}
    assert counts == {name: len(ids) for name, ids in arrays.items()}
    text = tokenizer().decode((arrays["chats"] & dataset.ID_BITS).tolist(), skip_special_tokens=False)
    assert all(example.text in text for example in documents(3, 0, 30))
    assert min(counts["tools"] + counts["long"], counts["easy"], counts["held_out"]) > 0


def test_batches_repeat_with_the_seed() -> None:
    ids = np.asarray(([1] * 9 + [0]) * 50, dtype=np.uint16)
    ids[:-1] += np.arange(len(ids) - 1, dtype=np.uint16) % 7 * (ids[:-1] > 0)
    first, again, other = (train_data.RowStream(ids, 0, length=32, seed=seed) for seed in (1, 1, 2))
    one = [first.take(2) for _ in range(20)]
    assert all(np.array_equal(x, again.take(2)) for x in one)
    assert not all(np.array_equal(x, other.take(2)) for x in one)
    assert one[0].shape == (2, 33)


def some_batches(tokens: dict[str, int], progress: float) -> Iterator[torch.Tensor]:
    """Documents of ten tokens, all equal in an array; token 0 leaves it empty."""
    arrays = {
        name: np.asarray(([token] * 9 + [0]) * (50 if token else 0), dtype=np.uint16)
        for name, token in tokens.items()
    }
    steps = plan(rows=10)
    return train_data.batches(
        arrays, 0, steps.shape, steps.long_shape, 3, train_data.Shares(), lambda: progress, 0
    )


def test_some_batches_have_long_rows() -> None:
    found = some_batches({"chats": 1, "tools": 1, "easy": 1, "long": 2}, 0.0)
    for step in range(1, 10):
        rows = next(found)
        is_long = step % 3 == 0
        assert rows.shape == ((5, 65) if is_long else (10, 33))
        assert int(rows.max()) == (2 if is_long else 1)
    without = some_batches({"chats": 1, "tools": 1, "easy": 1, "long": 0}, 0.0)
    assert {tuple(next(without).shape) for _ in range(4)} == {(10, 33)}


def test_mixture_changes_after_a_third_of_the_training() -> None:
    for progress, wanted in ((0.2, {1: 4, 2: 2, 3: 4}), (0.5, {1: 5, 2: 4, 3: 1})):
        rows = next(some_batches({"chats": 1, "tools": 2, "easy": 3, "long": 0}, progress))
        assert Counter(rows.max(dim=1).values.tolist()) == wanted


def test_loss_counts_only_learned_tokens() -> None:
    torch.manual_seed(0)
    model = Decoder(TINY)
    model.tool_weight = 2.0
    rows = torch.randint(3, TINY.vocab_size, (2, 9))
    given = rows.clone()
    given[:, 1:5] |= dataset.GIVEN_BIT
    changed = given.clone()
    changed[:, 5:] |= dataset.TOOL_BIT
    with torch.no_grad():
        whole, rest = float(model.loss(rows)), float(model.loss(given))
        logits = model(rows[:, :-1])[:, 4:]
        assert rest == pytest.approx(
            float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 5:].flatten()))
        )
        assert rest != pytest.approx(whole)
        assert float(model.loss(changed)) == pytest.approx(rest)  # all of the same weight
        changed[:, 8] ^= dataset.TOOL_BIT
        assert float(model.loss(changed)) != pytest.approx(rest)


def test_learning_rate_warms_up_and_decays() -> None:
    schedule = plan(steps=100)
    rates = [schedule.rate(schedule.progress(step, 0.0)) for step in range(101)]
    assert rates[0] < rates[2]
    assert max(rates) == pytest.approx(1e-2, rel=0.01)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(1e-2 * schedule.floor)
    assert plan(steps=None).progress(0, 30.0) == pytest.approx(0.5)


def test_training_learns_and_survives_a_broken_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Decoder(TINY)
    trainer = train.Trainer(model, plan(steps=30), torch.device("cpu"), compile_model=False)

    def broken(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no compiler for {rows.shape}")

    trainer.loss = broken
    trainer.warm_up()
    ids = np.asarray([5, 6, 7, 8, 0] * 40, dtype=np.uint16)
    stream = train_data.RowStream(ids, 0, length=32, seed=0)
    rows = (torch.from_numpy(stream.take(2)) for _ in range(30))
    loss = trainer.run(rows, lambda: None)
    assert trainer.done > 0.9
    assert loss < 3.0  # a uniform guess has ln 3072 = 8.0
    assert "going on without" in capsys.readouterr().out
    assert trainer.validate(ids, 0) < 1.0


def test_checkpoint_can_be_loaded_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder(TINY)
    export(model, tokenizer(), tmp_path, torch.float32)
    again = load(tmp_path)
    assert again.shape == TINY
    ids = torch.randint(0, TINY.vocab_size, (1, 20))
    with torch.no_grad():
        assert torch.equal(model(ids), again(ids))


def test_sums_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list(sums.small_sums(3))
    assert [one.result for one in asked if one.question == "What is 2 plus 9?"] == [11]
    answers = [f"It is {one.result}." for one in asked]
    answers[0] = "It is 999."
    monkeypatch.setattr(sums, "complete", lambda *_args, **_named: answers)
    report = sums.sum_report(Decoder(TINY), tokenizer(), 3)
    assert "plus up to 10    2 of 3" in report
    assert f"{len(asked) - 1} of {len(asked)}" in report


def test_completion_stops_at_the_end_token() -> None:
    model = Decoder(TINY)
    with torch.no_grad():  # every logit row prefers the end of the turn
        model.embed_tokens.weight.zero_()
        model.embed_tokens.weight[2] = 1.0
        model.embed_tokens.weight[3:] = 0.01
        model.norm.weight.fill_(5.0)
    assert complete(model, tokenizer(), ["Hello there", "Hi"], max_new=5, seed=0) == ["", ""]
