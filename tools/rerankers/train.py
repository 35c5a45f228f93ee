"""Trains the built-in cross-encoder and embedder: lists, tokenizer, training, export and evaluation in one command.

    python -m tools.rerankers.train --out FOLDER --seconds 80

writes FOLDER/cross_encoder, FOLDER/embedder and FOLDER/eval.json. `--seconds` is the time of both training loops
together; on a machine of 16 cores and a GPU everything else takes less than a minute.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from tools.rerankers.batches import Lists, sequences
from tools.rerankers.dataset import Arrays
from tools.rerankers.evaluate import evaluate, table
from tools.rerankers.export import export_cross_encoder, export_embedder, load_cross_encoder, load_embedder
from tools.rerankers.model import CROSS_ENCODER, DIMENSIONS, EMBEDDER, CrossEncoder, Embedder
from tools.rerankers.ranked import ANSWERS, RELATED, UNRELATED

_FROM_OTHERS = 2  # answers of other lists that a cross-encoder sees as unrelated texts
_HARD = 2  # texts of the own list, besides the answer, that the embedder has to tell apart
_SHARE_OF_CROSS_ENCODER = 0.6  # of the time
_RELATED_TARGET = 0.1  # the probability that a text on the subject should get
_TEMPERATURE = 0.05


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long to train, by the clock or by steps, and how fast."""

    seconds: float
    steps: int | None
    tokens: int  # of text, a step
    learning_rate: float
    seed: int
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0

    def progress(self, step: int, elapsed: float) -> float:
        """How much of the run is done, 0 to 1."""
        return step / self.steps if self.steps is not None else elapsed / self.seconds

    def rate(self, progress: float) -> float:
        """Linear warm-up, then a cosine to nothing."""
        if progress < self.warmup:
            return self.learning_rate * max(progress / self.warmup, 0.01)
        rest = min((progress - self.warmup) / (1 - self.warmup), 1.0)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * rest))


def cross_encoder_loss(model: CrossEncoder, lists: Lists, index: Tensor, step: int) -> Tensor:
    """The answer before all others, related texts before unrelated ones, and scores that read as probabilities."""
    shifts = [(1 + step % max(1, len(index) - 1) + extra) % len(index) for extra in range(_FROM_OTHERS)]
    own = lists.texts.shape[1]
    columns = [lists.text(index, place) for place in range(own)]
    columns += [lists.text(index.roll(shift), 0) for shift in shifts]
    room = max(ids.shape[1] for ids, _ in columns)
    ids = torch.stack([F.pad(ids, (0, room - ids.shape[1])) for ids, _ in columns], dim=1).flatten(0, 1)
    lengths = torch.stack([lengths for _, lengths in columns], dim=1).flatten()
    query, query_lengths = (part.repeat_interleave(len(columns), 0) for part in lists.query(index))
    inputs = sequences([(query, query_lengths), (ids, lengths)], model.bert.shape.max_position_embeddings)
    scores = model(inputs.ids, inputs.types, inputs.mask).float().view(len(index), -1)
    others = torch.stack([lists.keys[index.roll(shift)] for shift in shifts], dim=1)
    grades = F.pad(lists.grades[index].long(), (0, _FROM_OTHERS), value=UNRELATED)
    used = torch.ones_like(scores, dtype=torch.bool)
    used[:, own:] = others != lists.keys[index, None]  # the same subject may well be an answer
    return ranking_loss(scores, grades, used)


def ranking_loss(scores: Tensor, grades: Tensor, used: Tensor) -> Tensor:
    """Of scores [lists, texts] whose first column answers."""
    first = F.cross_entropy(scores.masked_fill(~used, float("-inf")), torch.zeros_like(grades[:, 0]))
    between = (grades == RELATED)[:, :, None] & (grades == UNRELATED)[:, None, :] & used[:, None, :]
    wrong = F.softplus(scores[:, None, :] - scores[:, :, None])
    order = (wrong * between).sum() / between.sum().clamp(min=1)
    targets = (grades == ANSWERS).float() + _RELATED_TARGET * (grades == RELATED).float()
    absolute = F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
    return first + 0.3 * order + (absolute * used).sum() / used.sum()


def embedder_loss(model: Embedder, lists: Lists, index: Tensor, step: int) -> Tensor:
    """The query's vector nearest to its answer's among all texts of the batch, and the other way round."""
    most, own = model.bert.shape.max_position_embeddings, lists.texts.shape[1]
    places = [0, *(1 + (step + extra * (own // 2)) % (own - 1) for extra in range(_HARD))]
    parts = [lists.query(index), *(lists.text(index, place) for place in places)]
    vectors = []
    for part in parts:
        inputs = sequences([part], most)
        vectors.append(model(inputs.ids, inputs.types, inputs.mask))
    keys = lists.keys[index]
    same = (keys[:, None] == keys[None, :]) & ~torch.eye(len(index), dtype=torch.bool, device=keys.device)
    targets = torch.arange(len(index), device=keys.device)
    total = torch.zeros((), device=keys.device)
    for cut in DIMENSIONS:
        query, answer, *hard = (F.normalize(vector[:, :cut], dim=-1) for vector in vectors)
        near = (query @ answer.T / _TEMPERATURE).masked_fill(same, float("-inf"))
        far = query @ torch.cat(hard).T / _TEMPERATURE
        total = total + F.cross_entropy(torch.cat((near, far), dim=1), targets)
        total = total + 0.5 * F.cross_entropy(near.T, targets)
    return total / len(DIMENSIONS)


class ListTrainer:
    """Trains one model on batches of lists."""

    def __init__(self, name: str, model: nn.Module, lists: Lists, schedule: Schedule) -> None:
        self.name, self.model, self.lists, self.schedule = name, model.to(lists.device), lists, schedule
        on_gpu = lists.device.type == "cuda"
        self.autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        groups = [
            {"params": matrices, "weight_decay": schedule.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.98), fused=on_gpu)

    def step(self, loss_of: Callable[[Tensor, int], Tensor], index: Tensor, step: int, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.autocast:
            loss = loss_of(index, step)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.schedule.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def run(self, loss_of: Callable[[Tensor, int], Tensor]) -> dict[str, float]:
        """Trains until the schedule is done. Returns what there is to say about it."""
        began, step, losses, recent = time.monotonic(), 0, [], float("nan")
        batches = self.lists.batches(self.schedule.tokens, self.schedule.seed)
        while (progress := self.schedule.progress(step, time.monotonic() - began)) < 1:
            losses.append(self.step(loss_of, next(batches), step, self.schedule.rate(progress)))
            step += 1
            if len(losses) == 500:
                recent = self._report(step, losses, began)
        recent = self._report(step, losses, began) if losses else recent
        return {"steps": step, "seconds": round(time.monotonic() - began, 1), "loss": round(recent, 4)}

    def _report(self, step: int, losses: list[Tensor], began: float) -> float:
        recent = float(torch.stack(losses).mean())
        losses.clear()
        print(f"{self.name}: step {step}, loss {recent:.4f}, {time.monotonic() - began:.1f} s", flush=True)
        return recent


def prepare(arguments: argparse.Namespace) -> tuple[Arrays, Tokenizer]:
    """Runs the generator in its own process, which stays free of torch, and loads what it wrote."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "tools.rerankers.dataset", "--out", name]
        command += ["--lists", str(arguments.lists), "--seed", str(arguments.seed)]
        command += ["--processes", str(arguments.processes)]
        subprocess.run(command, check=True)
        return Lists.read(Path(name)), Tokenizer.from_file(f"{name}/tokenizer.json")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the built-in cross-encoder and embedder.")
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder of both checkpoints and of eval.json"
    )
    parser.add_argument("--seconds", type=float, default=80.0, help="time of both training loops together")
    parser.add_argument("--cross-encoder-steps", type=int, help="so many steps instead of a time")
    parser.add_argument("--embedder-steps", type=int, help="so many steps instead of a time")
    parser.add_argument("--lists", type=int, default=220_000)
    parser.add_argument("--tokens", type=int, default=64_000, help="of text in a step")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--evaluated", type=int, default=300, help="lists of each generated test set")
    parser.add_argument("--tiny", action="store_true", help="one layer each, to try it on a CPU")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def begin_with(cross_encoder: CrossEncoder, embedder: Embedder) -> None:
    """Gives the cross-encoder the words and the first layers of the embedder, which knows what words mean by then."""
    begun = {
        name: value for name, value in embedder.bert.state_dict().items() if not name.startswith("pooler")
    }
    cross_encoder.bert.load_state_dict(begun, strict=False)


def train_both(
    arguments: argparse.Namespace, lists: Lists, tokenizer: Tokenizer
) -> dict[str, dict[str, float]]:
    """Trains and exports the two models, the embedder first."""
    schedule = Schedule(0.0, None, arguments.tokens, arguments.learning_rate, arguments.seed)
    shapes = [
        replace(shape, num_hidden_layers=1) if arguments.tiny else shape
        for shape in (CROSS_ENCODER, EMBEDDER)
    ]
    share = _SHARE_OF_CROSS_ENCODER
    torch.manual_seed(arguments.seed)
    cross_encoder, embedder = CrossEncoder(shapes[0], dropout=0.05), Embedder(shapes[1], dropout=0.05)
    told = {}
    plan = replace(schedule, seconds=(1 - share) * arguments.seconds, steps=arguments.embedder_steps)
    trainer = ListTrainer("embedder", embedder, lists, plan)
    told["embedder"] = trainer.run(lambda index, step: embedder_loss(embedder, lists, index, step))
    export_embedder(embedder, tokenizer, arguments.out / "embedder")
    begin_with(cross_encoder, embedder)
    plan = replace(schedule, seconds=share * arguments.seconds, steps=arguments.cross_encoder_steps)
    trainer = ListTrainer("cross-encoder", cross_encoder, lists, plan)
    told["cross_encoder"] = trainer.run(
        lambda index, step: cross_encoder_loss(cross_encoder, lists, index, step)
    )
    export_cross_encoder(cross_encoder, tokenizer, arguments.out / "cross_encoder")
    for name, found in told.items():
        found["bytes"] = sum(
            path.stat().st_size for path in (arguments.out / name).rglob("*") if path.is_file()
        )
    return told


def main() -> None:
    arguments = parse()
    began = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arrays, tokenizer = prepare(arguments)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lists = Lists(arrays, device)
    print(f"train: {len(lists):,} lists on {device} after {time.monotonic() - began:.1f} s", flush=True)
    told: dict[str, object] = {"seed": arguments.seed, "lists": len(lists)}
    told |= train_both(arguments, lists, tokenizer)
    # What is measured is what was exported, with its weights rounded.
    cross_encoder = load_cross_encoder(arguments.out / "cross_encoder").to(device)
    embedder = load_embedder(arguments.out / "embedder").to(device)
    told |= evaluate(cross_encoder, embedder, tokenizer, arguments.seed + 1, arguments.evaluated)
    (arguments.out / "eval.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(table(told["sets"]))  # type: ignore[arg-type]
    print(f"train: done after {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
