"""Trains the built-in model: corpus, tokenizer, training, export and samples in one command.

    python -m tools.builtin.train --out FOLDER --minutes 8

`--minutes` is the time of the whole command: the corpus is made (about 80 seconds on 16 cores) while the model
compiles, and the training loop gets what is left, but for half a minute for the samples. What was learned so far is
exported every minute, at the end, and on Ctrl-C or SIGTERM. With `--init FOLDER` a run goes on from the checkpoint of
another.
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
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.builtin.chat_format import END_OF_TEXT
from tools.builtin.dataset import ARRAYS
from tools.builtin.export import export, load
from tools.builtin.model import TINY, Decoder, Shape
from tools.builtin.sample import sample_report
from tools.builtin.sums import sum_report
from tools.builtin.tokenizer import token_id
from tools.builtin.train_data import Ids, Shares, batches, row_starts

_SAVE_EVERY_S = 60.0
_AFTERWARDS_S = 30.0  # for the held-out loss and the samples


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train. Without `steps` the clock decides how long, and the learning rate follows the clock."""

    seconds: float  # of the training loop
    steps: int | None
    rows: int  # a step, of `length` tokens
    length: int
    long_length: int  # of the rows for long documents; a step of these has as many tokens
    long_every: int  # one of so many steps has long rows
    learning_rate: float
    seed: int
    warmup: float = 0.02  # of the whole run
    weight_decay: float = 0.1
    clip: float = 1.0
    floor: float = 0.02  # of the learning rate, at the end

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.length

    @property
    def long_shape(self) -> tuple[int, int]:
        return max(1, self.rows * self.length // self.long_length), self.long_length

    def progress(self, step: int, elapsed: float) -> float:
        """How much of the run is done, 0 to 1."""
        return step / self.steps if self.steps is not None else elapsed / max(self.seconds, 1.0)

    def rate(self, progress: float) -> float:
        """Linear warm-up, then a cosine."""
        if progress < self.warmup:
            return self.learning_rate * max(progress / self.warmup, 0.01)
        rest = min((progress - self.warmup) / (1 - self.warmup), 1.0)
        return self.learning_rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * rest)))


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
        self.done = 0.0  # of the plan

    def warm_up(self) -> None:
        """Compiles both shapes of rows; falls back to the plain model where the compiler does not work."""
        for rows, length in (self.plan.shape, self.plan.long_shape):
            ids = torch.zeros((rows, length + 1), dtype=torch.int64, device=self.device)
            try:
                with self.autocast:
                    loss: Tensor = self.loss(ids)
                torch.autograd.backward(loss)
            except Exception as error:
                if self.loss == self.model.loss:
                    raise
                print(f"train: not compiled ({type(error).__name__}), going on without", flush=True)
                self.loss = self.model.loss
            self.optimizer.zero_grad(set_to_none=True)

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

    def run(self, data: Iterator[Tensor], save: Callable[[], None]) -> float:
        """Trains until the plan is done or someone interrupts, saving now and then. Returns the last loss."""
        began, recent, step = time.monotonic(), float("nan"), 0
        saved = began
        losses: list[Tensor] = []
        try:
            while (progress := self.plan.progress(step, time.monotonic() - began)) < 1:
                self.done = progress
                losses.append(self.step(next(data), self.plan.rate(progress)))
                step += 1
                if time.monotonic() - saved > _SAVE_EVERY_S:
                    save()
                    saved = time.monotonic()
                if len(losses) == 200 or step <= 1:
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


def start_corpus(arguments: argparse.Namespace, folder: str) -> subprocess.Popen[bytes]:
    """Runs the generator in its own process, which stays free of torch."""
    command = [sys.executable, "-m", "tools.builtin.dataset", "--out", folder]
    command += ["--documents", str(arguments.documents), "--seed", str(arguments.seed)]
    command += ["--tool-chats", str(arguments.tool_chats), "--easy-chats", str(arguments.easy_chats)]
    command += ["--processes", str(arguments.processes), "--seconds", str(arguments.corpus_seconds)]
    if arguments.tokenizer:
        command += ["--tokenizer", str(arguments.tokenizer)]
    return subprocess.Popen(command)


def finished_corpus(process: subprocess.Popen[bytes], folder: Path) -> tuple[dict[str, Ids], Tokenizer]:
    """Waits for the generator and loads what it wrote."""
    if process.wait():
        raise SystemExit(f"train: the corpus failed with exit code {process.returncode}")
    arrays = {name: np.load(folder / f"{name}.npy") for name in ARRAYS}
    return arrays, Tokenizer.from_file(str(folder / "tokenizer.json"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=8.0, help="time of the whole command")
    parser.add_argument("--init", type=Path, help="a checkpoint to go on from; its tokenizer is used")
    parser.add_argument("--steps", type=int, help="train this many steps instead of a time")
    parser.add_argument("--tiny", action="store_true", help="a toy size that runs on a CPU in seconds")
    parser.add_argument("--documents", type=int, help="default 1,100,000; 2,000 with --tiny")
    parser.add_argument("--tool-chats", type=int, help="default 380,000; 500 with --tiny")
    parser.add_argument("--easy-chats", type=int, help="default 250,000; 500 with --tiny")
    parser.add_argument("--corpus-seconds", type=float, default=95.0, help="stop generating after this time")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokenizer", type=Path, help="an already trained tokenizer.json")
    parser.add_argument("--rows", type=int, help="sequences per step; default 32, 4 with --tiny")
    parser.add_argument("--length", type=int, help="tokens per sequence; default 1024, 128 with --tiny")
    parser.add_argument("--long-length", type=int, help="of long documents; default 4096, 512 with --tiny")
    parser.add_argument("--long-every", type=int, default=8, help="one step of so many has long sequences")
    parser.add_argument("--layers", type=int, default=Shape().num_hidden_layers)
    # They are few of all tokens, and every one of them has to be right.
    parser.add_argument(
        "--tool-weight", type=float, default=3.0, help="of tokens written in chats with tools"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    arguments.documents = arguments.documents or (2_000 if arguments.tiny else 1_100_000)
    arguments.tool_chats = arguments.tool_chats or (500 if arguments.tiny else 380_000)
    arguments.easy_chats = arguments.easy_chats or (500 if arguments.tiny else 250_000)
    if arguments.init:
        arguments.tokenizer = arguments.init / "tokenizer.json"
    return arguments


def new_model(arguments: argparse.Namespace) -> Decoder:
    if arguments.init:
        return load(arguments.init)
    return Decoder(TINY if arguments.tiny else replace(Shape(), num_hidden_layers=arguments.layers))


def plan_of(arguments: argparse.Namespace) -> Plan:
    return Plan(
        seconds=60 * arguments.minutes,
        steps=arguments.steps,
        rows=arguments.rows or (4 if arguments.tiny else 32),
        length=arguments.length or (128 if arguments.tiny else 1024),
        long_length=arguments.long_length or (512 if arguments.tiny else 4096),
        long_every=arguments.long_every,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )


def report(trainer: Trainer, tokenizer: Tokenizer, arguments: argparse.Namespace) -> str:
    """Samples to read, and how many small sums are still known by heart."""
    trainer.model.eval()
    max_new = 20 if arguments.tiny else 600
    samples = sample_report(trainer.model, tokenizer, arguments.seed, max_new=max_new)
    return samples + "\n" + sum_report(trainer.model, tokenizer, count=2 if arguments.tiny else 40)


def main() -> None:
    began = time.monotonic()
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        corpus = start_corpus(arguments, folder)
        model = new_model(arguments)
        model.tool_weight = arguments.tool_weight
        print(f"train: {sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
        compiled = device.type == "cuda" and not arguments.no_compile
        trainer = Trainer(model, plan_of(arguments), device, compiled)
        if compiled:
            trainer.warm_up()
            print(f"train: compiled after {time.monotonic() - began:.0f} s", flush=True)
        arrays, tokenizer = finished_corpus(corpus, Path(folder))
    plan = trainer.plan
    trainer.plan = replace(plan, seconds=plan.seconds - (time.monotonic() - began) - _AFTERWARDS_S)
    print(f"train: begins after {time.monotonic() - began:.0f} s", flush=True)
    end = token_id(tokenizer, END_OF_TEXT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Who goes on from a checkpoint can copy already.
    shares = Shares(easy_early=Shares().easy, tools_early=Shares().tools) if arguments.init else Shares()
    data = batches(
        arrays, end, plan.shape, plan.long_shape, plan.long_every, shares, lambda: trainer.done, plan.seed
    )
    train_loss = trainer.run(data, lambda: export(model, tokenizer, arguments.out))
    export(model, tokenizer, arguments.out)
    held_out_loss = trainer.validate(arrays["held_out"], end)
    print(f"train: loss {train_loss:.4f}, held-out loss {held_out_loss:.4f}", flush=True)
    text = report(trainer, tokenizer, arguments)
    (arguments.out / "samples.txt").write_text(text, encoding="utf-8")
    print(text)
    print(f"train: done after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
