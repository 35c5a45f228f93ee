"""`inflight eval` and `inflight quantize`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from inflight.cli import interrupts_end_at_once
from inflight.cli.option_sources import argument, with_flags
from inflight.config import ENGINE_OPTIONS, EngineConfig
from inflight.errors import ConfigError, as_gib

QUANTIZE_OPTIONS = ("revision", "download_dir")
EVAL_OPTIONS = (
    *("quantization", "quantize_head", "kv_cache_dtype", "kv_cache_dtype_skip_layers"),
    *("revision", "dtype", "device", "load_format"),
)
MAX_TEXT = 64 << 20  # bytes
_TEXT = typer.Option("--text", help="A file with the text to score.", exists=True, dir_okay=False)
_REFERENCE = typer.Option(
    help="The model to compare with: a folder or a hub id.",
    show_default="the model without --quantization and --kv-cache-dtype",
)
_WINDOW = typer.Option(min=2, help="Tokens of a piece of the text; each piece starts without context.")
_MAX_TOKENS = typer.Option(min=2, help="Score only the first tokens.", show_default="all")


@with_flags((ENGINE_OPTIONS[name] for name in EVAL_OPTIONS), panel="Engine")
def evaluate(
    text: Annotated[Path, _TEXT],
    model: Annotated[str | None, argument(ENGINE_OPTIONS["model"])] = None,
    reference: Annotated[str | None, _REFERENCE] = None,
    window: Annotated[int, _WINDOW] = 512,
    max_tokens: Annotated[int | None, _MAX_TOKENS] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **engine: Any,
) -> None:
    """Show how well a model predicts a text, and how far quantization changed its predictions."""
    if text.stat().st_size > MAX_TEXT:
        raise ConfigError(f"{text} has {text.stat().st_size:,} bytes: at most {MAX_TEXT:,} are read")
    with interrupts_end_at_once():
        from inflight.loading import evaluation

    config = EngineConfig.create(model, **engine)
    other = None
    if reference is not None:
        same = {name: value for name, value in engine.items() if name in ("dtype", "device", "load_format")}
        other = EngineConfig.create(reference, **same)
    elif config.model.quantization is not None or config.cache.kv_cache_dtype != "auto":
        other = evaluation.unquantized(config)
    content = text.read_text(encoding="utf-8", errors="replace")
    result = evaluation.evaluate(config, content, other, window, max_tokens)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    table = Table(show_header=False)
    table.add_row("tokens", f"{result.num_tokens:,}")
    table.add_row("weights", as_gib(result.weight_bytes))
    table.add_row("perplexity", f"{result.perplexity:.4f}")
    if result.agreement is not None:
        change = result.perplexity / result.agreement.perplexity - 1
        table.add_row("of the reference", f"{result.agreement.perplexity:.4f} ({change:+.2%})")
        table.add_row("KL divergence", f"{result.agreement.divergence:.5f} nats per token")
        table.add_row("same top token", f"{result.agreement.top_1:.2%}")
    Console().print(table)


@with_flags((ENGINE_OPTIONS[name] for name in QUANTIZE_OPTIONS), panel="Engine")
def quantize(
    model: Annotated[str, typer.Argument(help="A folder with a checkpoint, or a hub id.")],
    out: Annotated[Path, typer.Argument(help="The folder to write, which must not exist.")],
    name: Annotated[str, typer.Option("--format", help="fp8, int8 or int4.")] = "fp8",
    **engine: Any,
) -> None:
    """Write a quantized copy of a checkpoint, in compressed-tensors files that other engines load, too."""
    with interrupts_end_at_once():
        from inflight.loading.quantizing import quantize_checkpoint  # imports torch, which is slow
        from inflight.models.quantization import ON_LOADING

    if name not in ON_LOADING:
        raise ConfigError(f"--format is {name!r}: it must be one of {', '.join(ON_LOADING)}")
    with Progress(transient=True) as progress:
        task = progress.add_task("Quantizing", total=None)
        quantize_checkpoint(
            EngineConfig.create(model, **engine),
            out,
            name,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    print(f"wrote {out}")
