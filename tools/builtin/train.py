"""Trains the built-in model: corpus, tokenizer, training, export and samples in one command.

    python -m tools.builtin.train --out FOLDER --minutes 7

`--minutes` is the time of the training loop; generating the corpus and sampling come on top (about two minutes
on 16 cores). What was learned so far is exported every minute, at the end, and on Ctrl-C or SIGTERM.
"""

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.builtin.chat_format import END_OF_TEXT
from tools.builtin.export import export
from tools.builtin.model import TINY, Decoder, Shape
from tools.builtin.sample import sample_report
from tools.builtin.tokenizer import token_id

Ids = npt.NDArray[np.uint16]
_SAVE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train. Without `steps` the clock decides how long, and the learning rate follows the clock."""

    minutes: float
    steps: int | None
    rows: int  # a step, of `length` tokens
    length: int
    long_length: int  # of the rows for long documents; a step of these has as many tokens
    long_every: int  # so many steps is one of long rows
    learning_rate: float
    seed: int
    warmup: float = 0.02  # of the whole run
    weight_decay: float = 0.1
    clip: float = 1.0
    floor: float = 0.02  # of the learning rate, at the end

    def progress(self, step: int, elapsed: float) -> float:
        """How much of the run is done, 0 to 1."""
        return step / self.steps if self.steps is not None else elapsed / (60 * self.minutes)

    def rate(self, progress: float) -> float:
        """Linear warm-up, then a cosine."""
        if progress < self.warmup:
            return self.learning_rate * max(progress / self.warmup, 0.01)
        rest = min((progress - self.warmup) / (1 - self.warmup), 1.0)
        return self.learning_rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * rest)))


def row_starts(ids: Ids, end: int, length: int, skip: int) -> npt.NDArray[np.int64]:
    """Where rows of length + 1 tokens begin: always at a document, never past the end.

    A document that is cut by the end of its row begins the next row, so each is seen whole in every pass.
    `skip` documents are left out at the front, which shifts all rows from pass to pass.
    """
    starts = np.concatenate(([0], np.flatnonzero(ids == end) + 1))[:-1]
    starts = starts[starts + length + 1 <= len(ids)]
    chosen, place = [], min(skip, len(starts) - 1)
    while True:
        chosen.append(starts[place])
        # The last document that begins inside this row; at least one further, for documents longer than a row.
        following = int(np.searchsorted(starts, starts[place] + length, side="right")) - 1
        following = max(following, place + 1)
        if following >= len(starts):
            return np.asarray(chosen)
        place = following


def batches(ids: Ids, end: int, rows: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless batches [rows, length + 1], every pass over the corpus in a new order."""
    generator = np.random.default_rng(seed)
    window = np.arange(length + 1)
    while True:
        starts = row_starts(ids, end, length, int(generator.integers(0, 64)))
        generator.shuffle(starts)
        if len(starts) < rows:
            starts = np.resize(starts, rows)
        for first in range(0, len(starts) - rows + 1, rows):
            picked = starts[first : first + rows, None] + window
            yield torch.from_numpy(ids[picked].astype(np.int64))


def mixed_batches(short: Ids, long: Ids, end: int, plan: Plan) -> Iterator[Tensor]:
    """Batches of short rows, and every so often one of long rows with as many tokens."""
    usual = batches(short, end, plan.rows, plan.length, plan.seed)
    if len(long) <= plan.long_length:  # as in a toy corpus
        yield from usual
    rows = max(1, plan.rows * plan.length // plan.long_length)
    rare = batches(long, end, rows, plan.long_length, plan.seed)
    for step in count(1):
        yield next(rare if step % plan.long_every == 0 else usual)


def optimizer_for(model: Decoder, plan: Plan, fused: bool) -> torch.optim.AdamW:
    """Weight decay for the matrices only; norms keep their size."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": plan.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), fused=fused)


class Trainer:
    def __init__(self, model: Decoder, plan: Plan, device: torch.device, compile_model: bool) -> None:
        self.model, self.plan, self.device = model.to(device), plan, device
        on_gpu = device.type == "cuda"
        self.optimizer = optimizer_for(model, plan, fused=on_gpu)
        self.autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()
        self.loss = torch.compile(model.loss, dynamic=False) if compile_model else model.loss

    def step(self, rows: Tensor, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.autocast:
            loss: Tensor = self.loss(rows.to(self.device, non_blocking=True))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def first_step(self, rows: Tensor, rate: float) -> Tensor:
        """A step that falls back to the plain model if the compiler does not work on this machine."""
        try:
            return self.step(rows, rate)
        except Exception as error:
            if self.loss == self.model.loss:
                raise
            print(f"train: not compiled ({type(error).__name__}), going on without", flush=True)
            self.loss = self.model.loss
            self.optimizer.zero_grad(set_to_none=True)
            return self.step(rows, rate)

    def run(self, data: Iterator[Tensor], save: Callable[[], None]) -> float:
        """Trains until the plan is done or someone interrupts, saving now and then. Returns the last loss."""
        began, recent, step = time.monotonic(), float("nan"), 0
        saved = began
        losses: list[Tensor] = []
        try:
            while (progress := self.plan.progress(step, time.monotonic() - began)) < 1:
                rows = next(data)
                take = self.step if step else self.first_step
                losses.append(take(rows, self.plan.rate(progress)))
                step += 1
                if time.monotonic() - saved > _SAVE_EVERY_S:
                    save()
                    saved = time.monotonic()
                if len(losses) == 100 or step <= 1:
                    recent = float(torch.stack(losses).mean())
                    losses.clear()
                    self._report(step, recent, time.monotonic() - began)
        except KeyboardInterrupt:
            print("train: interrupted, exporting what was learned", flush=True)
        recent = float(torch.stack(losses).mean()) if losses else recent
        self._report(step, recent, time.monotonic() - began)
        return recent

    def _report(self, step: int, loss: float, elapsed: float) -> None:
        tokens = step * self.plan.rows * self.plan.length
        print(
            f"train: step {step}, {tokens / 1e6:.0f}M tokens, loss {loss:.4f}, {elapsed:.0f} s, "
            f"{tokens / max(elapsed, 1e-9) / 1e6:.2f}M tokens/s",
            flush=True,
        )

    @torch.no_grad()
    def validate(self, ids: Ids, end: int, most: int = 64) -> float:
        """Mean loss on held-out documents."""
        starts = row_starts(ids, end, self.plan.length, 0)[: most * 8]
        window = np.arange(self.plan.length + 1)
        losses = []
        for first in range(0, len(starts), most):
            rows = torch.from_numpy(ids[starts[first : first + most, None] + window].astype(np.int64))
            with self.autocast:
                losses.append(float(self.model.loss(rows.to(self.device))))
        return float(np.mean(losses))


def prepare(arguments: argparse.Namespace) -> tuple[Ids, Ids, Ids, Tokenizer]:
    """Runs the generator in its own process, which stays free of torch, and loads what it wrote."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tools.builtin.dataset", "--out", name]
        command += ["--documents", str(arguments.documents), "--seed", str(arguments.seed)]
        command += ["--tool-chats", str(arguments.tool_chats)]
        command += ["--processes", str(arguments.processes), "--seconds", str(arguments.corpus_seconds)]
        if arguments.tokenizer:
            command += ["--tokenizer", str(arguments.tokenizer)]
        subprocess.run(command, check=True)
        train, long, held_out = (np.load(folder / f"{name}.npy") for name in ("train", "long", "held_out"))
        return train, long, held_out, Tokenizer.from_file(str(folder / "tokenizer.json"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=7.0, help="time of the training loop")
    parser.add_argument("--steps", type=int, help="train this many steps instead of a time")
    parser.add_argument("--tiny", action="store_true", help="a toy size that runs on a CPU in seconds")
    parser.add_argument("--documents", type=int, help="default 1,600,000; 2,000 with --tiny")
    parser.add_argument("--tool-chats", type=int, help="default 600,000; 500 with --tiny")
    parser.add_argument("--corpus-seconds", type=float, default=120.0, help="stop generating after this time")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokenizer", type=Path, help="an already trained tokenizer.json")
    parser.add_argument("--rows", type=int, help="sequences a step; default 64, 4 with --tiny")
    parser.add_argument("--length", type=int, help="tokens a sequence; default 1024, 128 with --tiny")
    parser.add_argument("--long-length", type=int, help="of long documents; default 4096, 512 with --tiny")
    parser.add_argument("--long-every", type=int, default=5, help="one step of so many has long sequences")
    parser.add_argument("--layers", type=int, default=Shape().num_hidden_layers)
    # They are few of all tokens, and every one of them has to be right.
    parser.add_argument(
        "--tool-weight", type=float, default=2.0, help="of tokens written in chats with tools"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    arguments.documents = arguments.documents or (2_000 if arguments.tiny else 1_600_000)
    arguments.tool_chats = arguments.tool_chats or (500 if arguments.tiny else 600_000)
    return arguments


def main() -> None:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    train_ids, long_ids, held_out_ids, tokenizer = prepare(arguments)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Decoder(TINY if arguments.tiny else replace(Shape(), num_hidden_layers=arguments.layers))
    model.tool_weight = arguments.tool_weight
    print(f"train: {sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
    plan = Plan(
        minutes=arguments.minutes,
        steps=arguments.steps,
        rows=arguments.rows or (4 if arguments.tiny else 64),
        length=arguments.length or (128 if arguments.tiny else 1024),
        long_length=arguments.long_length or (512 if arguments.tiny else 4096),
        long_every=arguments.long_every,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )
    trainer = Trainer(model, plan, device, compile_model=device.type == "cuda" and not arguments.no_compile)
    end = token_id(tokenizer, END_OF_TEXT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    data = mixed_batches(train_ids, long_ids, end, plan)
    train_loss = trainer.run(data, lambda: export(model, tokenizer, arguments.out))
    export(model, tokenizer, arguments.out)
    print(
        f"train: loss {train_loss:.4f}, held-out loss {trainer.validate(held_out_ids, end):.4f}", flush=True
    )
    model.eval()
    report = sample_report(model, tokenizer, arguments.seed, max_new=20 if arguments.tiny else 600)
    (arguments.out / "samples.txt").write_text(report, encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
