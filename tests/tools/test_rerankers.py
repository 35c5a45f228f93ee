"""The small rerankers: their lists, their tokenizer, and that what is trained is what transformers loads."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from tools.rerankers.batches import Lists, sequences
from tools.rerankers.bm25 import Bm25
from tools.rerankers.corpus import SOURCES, ranked_list
from tools.rerankers.dataset import encode, make_tokenizer
from tools.rerankers.evaluate import TEXTS, figures, written_lists
from tools.rerankers.export import export_cross_encoder, export_embedder, load_cross_encoder
from tools.rerankers.model import CROSS_ENCODER, EMBEDDER, BertShape, CrossEncoder, Embedder
from tools.rerankers.ranked import ANSWERS, RELATED, UNRELATED
from tools.rerankers.train import cross_encoder_loss, embedder_loss, ranking_loss
from tools.rerankers.wording import Side, name

SMALL = BertShape(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2)


@cache
def tokenizer() -> Tokenizer:
    return make_tokenizer(seed=0, lists=50)


def stirred(model: torch.nn.Module) -> torch.nn.Module:
    """Norms and biases away from one and zero, so that a swapped one would show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("source", SOURCES)
def test_list_depends_on_its_index_and_only_its_first_text_answers(source: str) -> None:
    for index in range(20):
        one = ranked_list(3, Side.TRAIN, index, 6, source)
        assert one == ranked_list(3, Side.TRAIN, index, 6, source)
        assert len(one.texts) == len(one.grades) == 6
        assert one.grades[0] == ANSWERS
        assert set(one.grades[1:]) <= {RELATED, UNRELATED}
        assert one.texts[0] not in one.texts[1:]


def test_held_out_texts_never_appear_in_training() -> None:
    seen = [ranked_list(0, Side.TRAIN, index, 6, "subject") for index in range(1000)]
    shown = " ".join(part for one in seen for part in (one.query, *one.texts)).lower()
    assert "two threads wait for each other" in shown
    assert "what is a deadlock" not in shown
    tested = {ranked_list(0, Side.SENTENCES, index, 2, "subject").query for index in range(1000)}
    assert any("What is a deadlock" in query for query in tested)
    rng = Random(0)
    names = [{name(rng, held_out=held_out).lower() for _ in range(300)} for held_out in (False, True)]
    assert names[0].isdisjoint(names[1])


def test_written_lists_have_as_many_texts_as_generated_ones() -> None:
    sets = written_lists()
    assert len(sets) == 4
    assert {len(one.texts) for lists in sets.values() for one in lists} == {TEXTS}


def test_every_ascii_word_splits_into_known_pieces() -> None:
    encoded = tokenizer().encode("zyxwv QUEUEING 90210 naïve", "(a+b)*c; {x: 1}")
    assert "[UNK]" not in encoded.tokens
    assert encoded.tokens[0] == "[CLS]"
    assert encoded.type_ids[0] == 0
    assert encoded.type_ids[-1] == 1


def test_pairs_on_the_device_match_the_tokenizer() -> None:
    one = [ranked_list(0, Side.TRAIN, index, 6) for index in range(8)]
    lists = Lists(encode(tokenizer(), one), torch.device("cpu"))
    index = torch.arange(8)
    inputs = sequences([lists.query(index), lists.text(index, 1)], 256)
    for row, found in enumerate(one):
        theirs = tokenizer().encode(found.query, found.texts[1])
        count = int(inputs.mask[row].sum())
        assert inputs.ids[row, :count].tolist() == theirs.ids
        assert inputs.types[row, :count].tolist() == theirs.type_ids
        assert not inputs.ids[row, count:].any()
    cut = sequences([lists.query(index), lists.text(index, 1)], 20)
    assert int(cut.mask.sum(1).max()) == 20
    single = sequences([lists.query(index)], 256)
    assert single.ids[0, : int(single.mask[0].sum())].tolist() == tokenizer().encode(one[0].query).ids


def test_exported_cross_encoder_has_equal_scores_in_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = CrossEncoder(SMALL)
    stirred(model)
    export_cross_encoder(model, tokenizer(), tmp_path, torch.float32)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(tmp_path)
    pairs = [
        ("Why does it rain?", "Water falls from the clouds."),
        ("tea", "Boil some fresh water, and wait."),
    ]
    batch = words(*map(list, zip(*pairs, strict=True)), return_tensors="pt", padding=True)
    assert (
        batch["input_ids"][0].tolist()[: len(tokenizer().encode(*pairs[0]).ids)]
        == tokenizer().encode(*pairs[0]).ids
    )
    with torch.no_grad():
        ours: Tensor = model(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"].bool())
        torch.testing.assert_close(ours, theirs(**batch).logits[:, 0], atol=1e-5, rtol=1e-5)
        again = load_cross_encoder(tmp_path)(
            batch["input_ids"], batch["token_type_ids"], batch["attention_mask"].bool()
        )
    torch.testing.assert_close(again, ours)


def test_exported_embedder_has_equal_vectors_in_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Embedder(SMALL)
    stirred(model)
    export_embedder(model, tokenizer(), tmp_path, torch.float32)
    theirs = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    batch = AutoTokenizer.from_pretrained(tmp_path)(
        ["a cloud", "rain falls on the hills"], return_tensors="pt", padding=True
    )
    with torch.no_grad():
        states = theirs(**batch).last_hidden_state * batch["attention_mask"][..., None]
        mean = states.sum(1) / batch["attention_mask"].sum(1, keepdim=True)
        ours = model(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"].bool())
    torch.testing.assert_close(ours, torch.nn.functional.normalize(mean, dim=-1), atol=1e-5, rtol=1e-5)
    assert (tmp_path / "1_Pooling" / "config.json").is_file()


def test_both_models_fit_into_six_megabytes() -> None:
    with torch.device("meta"):
        models = CrossEncoder(CROSS_ENCODER), Embedder(EMBEDDER)
    size = sum(2 * parameter.numel() for model in models for parameter in model.parameters())
    assert size + 2 * 60_000 < 6_000_000  # and two tokenizers


def test_losses_fall_on_repeated_lists() -> None:
    torch.manual_seed(0)
    lists = Lists(
        encode(tokenizer(), [ranked_list(0, Side.TRAIN, index, 6, "known") for index in range(8)]),
        torch.device("cpu"),
    )
    index = torch.arange(8)
    cross_encoder, embedder = CrossEncoder(SMALL), Embedder(SMALL)
    trained: list[tuple[torch.nn.Module, Callable[[], Tensor]]] = [
        (cross_encoder, lambda: cross_encoder_loss(cross_encoder, lists, index, 0)),
        (embedder, lambda: embedder_loss(embedder, lists, index, 0)),
    ]
    for model, loss_of in trained:
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        losses = []
        for _ in range(25):
            loss = loss_of()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.8 * losses[0]


def test_ranking_loss_rewards_answers_first_and_unrelated_texts_last() -> None:
    grades = torch.tensor([[ANSWERS, RELATED, UNRELATED]])
    used = torch.ones(1, 3, dtype=torch.bool)
    right = ranking_loss(torch.tensor([[3.0, -1.0, -3.0]]), grades, used)
    assert right < ranking_loss(torch.tensor([[3.0, -3.0, -1.0]]), grades, used)
    assert right < ranking_loss(torch.tensor([[-1.0, 3.0, -3.0]]), grades, used)


def test_bm25_weights_rare_words_and_ties_share_ranks() -> None:
    texts = ["the cat sat", "the dogs sat", "the tree"]
    scores = Bm25(texts).scores("the dog", texts)
    assert scores[1] > scores[0] > 0
    assert figures([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]) == {"first": 0.5, "mrr": pytest.approx(0.7, abs=0.01)}
    assert figures([[1.0, 1.0]]) == {"first": 0.5, "mrr": pytest.approx(2 / 3, abs=1e-4)}
