"""How well the models rank what they were never trained on, beside BM25.

    python -m tools.rerankers.evaluate --cross-encoder FOLDER --embedder FOLDER --out eval.json

Every list has ten texts, one of which answers. `first` is the share of lists whose answer comes first, `mrr` the mean
of 1 / rank. The generated sets have new names or new sentences; the written ones are data/written.txt.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.rerankers.batches import Inputs
from tools.rerankers.bm25 import Bm25
from tools.rerankers.corpus import SOURCES, ranked_list
from tools.rerankers.export import load_cross_encoder, load_embedder
from tools.rerankers.model import CrossEncoder, Embedder
from tools.rerankers.ranked import ANSWERS, UNRELATED, RankedList
from tools.rerankers.wording import DATA, Side

TEXTS = 10
_AT_ONCE = 50  # lists in one batch
Scores = list[list[float]]  # of every text of every list
Ranker = Callable[[Sequence[RankedList]], Scores]
SetFigures = dict[str, dict[str, float]]


def written_lists() -> dict[str, list[RankedList]]:
    """The written questions by set; each list is filled up with answers to other questions, as long as its own."""
    found: list[tuple[str, str, list[str]]] = []
    for line in (DATA / "written.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("? "):
            name, _, query = line[2:].partition("|")
            found.append((name.strip(), query.strip(), []))
        elif line.startswith(("+ ", "- ")):
            found[-1][2].append(line[2:])
    sets: dict[str, list[RankedList]] = defaultdict(list)
    for index, (name, query, texts) in enumerate(found):
        others = [one[2][0] for place, one in enumerate(found) if place != index]
        filled = (*texts, *Random(index).sample(others, TEXTS - len(texts)))
        grades = (ANSWERS, *[UNRELATED] * (TEXTS - 1))
        sets[f"written: {name}"].append(RankedList(query, query, filled, grades))
    return dict(sets)


def generated_lists(seed: int, count: int) -> dict[str, list[RankedList]]:
    """Lists with names that training never shows, then with sentences that it never shows, by source."""
    names = [ranked_list(seed, Side.NAMES, index, TEXTS, "invented") for index in range(count)]
    found = {"new names: invented": names}
    for source in SOURCES:
        lists = [ranked_list(seed, Side.SENTENCES, index, TEXTS, source) for index in range(count)]
        found[f"new sentences: {source}"] = lists
    return found


def _inputs(
    tokenizer: Tokenizer, texts: Sequence[str] | Sequence[tuple[str, str]], device: torch.device
) -> Inputs:
    encoded = tokenizer.encode_batch(list(texts))

    def tensor(key: str) -> Tensor:
        return torch.tensor([getattr(one, key) for one in encoded], device=device)

    return Inputs(tensor("ids"), tensor("type_ids"), tensor("attention_mask").bool())


def _ready(tokenizer: Tokenizer, most: int) -> Tokenizer:
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
    tokenizer.enable_truncation(most)
    return tokenizer


@torch.no_grad()
def rank_with_cross_encoder(model: CrossEncoder, tokenizer: Tokenizer, lists: Sequence[RankedList]) -> Scores:
    tokenizer = _ready(tokenizer, model.bert.shape.max_position_embeddings)
    device = model.classifier.weight.device
    found: Scores = []
    for start in range(0, len(lists), _AT_ONCE):
        part = lists[start : start + _AT_ONCE]
        inputs = _inputs(tokenizer, [(one.query, text) for one in part for text in one.texts], device)
        found += model(inputs.ids, inputs.types, inputs.mask).view(len(part), -1).tolist()
    return found


@torch.no_grad()
def rank_with_embedder(model: Embedder, tokenizer: Tokenizer, lists: Sequence[RankedList]) -> Scores:
    tokenizer = _ready(tokenizer, model.bert.shape.max_position_embeddings)
    device = model.bert.embeddings.word_embeddings.weight.device
    found: Scores = []
    for start in range(0, len(lists), _AT_ONCE):
        part = lists[start : start + _AT_ONCE]
        inputs = _inputs(tokenizer, [text for one in part for text in (one.query, *one.texts)], device)
        vectors = model(inputs.ids, inputs.types, inputs.mask).view(len(part), 1 + len(part[0].texts), -1)
        found += (vectors[:, 1:] @ vectors[:, 0, :, None])[..., 0].tolist()
    return found


def rank_with_bm25(lists: Sequence[RankedList]) -> Scores:
    bm25 = Bm25([text for one in lists for text in one.texts])
    return [bm25.scores(one.query, one.texts) for one in lists]


def figures(scores: Scores) -> dict[str, float]:
    """Of lists whose first text is the answer. Texts of equal score share their places."""
    first = reciprocal = 0.0
    for answer, *others in scores:
        better, equal = sum(score > answer for score in others), sum(score == answer for score in others)
        first += 0.0 if better else 1 / (1 + equal)
        reciprocal += 1 / (1 + better + equal / 2)
    return {"first": round(first / len(scores), 4), "mrr": round(reciprocal / len(scores), 4)}


def evaluate(
    cross_encoder: CrossEncoder, embedder: Embedder, tokenizer: Tokenizer, seed: int, count: int
) -> dict[str, object]:
    """The figures of all sets, and what each written question got as its first text."""
    rankers: dict[str, Ranker] = {
        "longest": lambda lists: [[float(len(text)) for text in one.texts] for one in lists],
        "bm25": rank_with_bm25,
        "cross_encoder": lambda lists: rank_with_cross_encoder(cross_encoder, tokenizer, lists),
        "embedder": lambda lists: rank_with_embedder(embedder, tokenizer, lists),
    }
    sets: dict[str, SetFigures] = {}
    answers: dict[str, dict[str, object]] = {}
    for name, lists in (generated_lists(seed, count) | written_lists()).items():
        ranked = {ranker: rank(lists) for ranker, rank in rankers.items()}
        sets[name] = {"lists": {"count": float(len(lists))}} | {
            ranker: figures(scores) for ranker, scores in ranked.items()
        }
        if name.startswith("written"):
            for index, one in enumerate(lists):
                answers[f"{name}: {one.query}"] = {
                    ranker: one.texts[max(range(TEXTS), key=scores[index].__getitem__)]
                    for ranker, scores in ranked.items()
                }
    return {"sets": sets, "first_texts": answers}


def table(sets: dict[str, SetFigures]) -> str:
    """The figures as a table of Markdown: first place / MRR."""
    columns = ("longest", "bm25", "cross_encoder", "embedder")
    lines = ["| set | lists | longest text | BM25 | cross-encoder | embedder |", f"| --- {'| ---: ' * 5}|"]
    for name, found in sets.items():
        cells = [f"{found[column]['first']:.0%} / {found[column]['mrr']:.2f}" for column in columns]
        lines.append(f"| {name} | {found['lists']['count']:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the built-in cross-encoder and embedder.")
    parser.add_argument("--cross-encoder", type=Path, required=True, help="its checkpoint folder")
    parser.add_argument("--embedder", type=Path, required=True, help="its checkpoint folder")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--lists", type=int, default=300, help="per generated set")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    found = evaluate(
        load_cross_encoder(arguments.cross_encoder),
        load_embedder(arguments.embedder),
        Tokenizer.from_file(str(arguments.cross_encoder / "tokenizer.json")),
        arguments.seed,
        arguments.lists,
    )
    print(table(found["sets"]))  # type: ignore[arg-type]
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
