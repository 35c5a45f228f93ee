"""`inflight plan`."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from inflight.cli import interrupts_end_at_once
from inflight.cli.option_sources import argument, with_flags
from inflight.config import ENGINE_OPTIONS, EngineConfig
from inflight.errors import ConfigError
from inflight.kv.layout import KVLayout

PLAN_OPTIONS = (
    *("revision", "dtype", "quantization", "quantize_head", "max_model_len", "block_size"),
    *("kv_cache_memory", "kv_cache_dtype", "kv_cache_dtype_skip_layers", "gpu_memory_utilization"),
    *("max_num_seqs", "max_num_batched_tokens"),
)
MAX_CPU_RANKS = 8  # shown in the table
GIB = 1 << 30
_UNITS = {"": 1}
for power, prefix in enumerate("KMGT", 1):
    _UNITS |= {prefix: 1000**power, f"{prefix}I": 1024**power}
_GPUS = typer.Option(metavar="NxSIZE", help="Number of GPUs and memory of each, such as 4x80GB.")
_CPU = typer.Option(metavar="SIZE", help="Memory of a machine without GPUs, such as 64GB.")


@with_flags((ENGINE_OPTIONS[name] for name in PLAN_OPTIONS), panel="Engine")
def plan(
    model: Annotated[str | None, argument(ENGINE_OPTIONS["model"])] = None,
    gpus: Annotated[str | None, _GPUS] = None,
    cpu: Annotated[str | None, _CPU] = None,
    **engine: Any,
) -> None:
    """Show whether a model fits, on how many ranks, and with how much KV memory, without loading it."""
    if (gpus is None) == (cpu is None):
        raise typer.BadParameter("give --gpus NxSIZE (4x80GB), or --cpu SIZE")
    with interrupts_end_at_once():
        from inflight.loading.planning import Devices, plan_devices  # imports torch

    config = EngineConfig.create(model, **engine)
    if gpus is not None:
        devices = Devices("cuda", *parse_gpus(gpus))
    else:
        devices = Devices("cpu", MAX_CPU_RANKS, parse_size(str(cpu), "--cpu"))
    layout = plan_devices(config, devices)
    dtype = str(layout.model.dtype).removeprefix("torch.")
    table = Table(
        title=f"{layout.parameters / 1e9:.2f} billion parameters in {dtype}, context {layout.model.context:,}",
        title_justify="left",
    )
    for column in ("tp x pp", "weights per rank", "KV per rank", "KV tokens", "full-length requests"):
        table.add_column(column, justify="right")
    for fit in layout.fits:
        largest = max(fit.shares, key=lambda share: share.weights + share.kv(fit.num_blocks))
        weights, kv = (f"{size / GIB:,.2f} GiB" for size in (largest.weights, largest.kv(fit.num_blocks)))
        cells = (
            (kv, f"{fit.num_tokens:,}", f"{fit.num_requests:,}")
            if fit.num_tokens
            else ("does not fit", "", "")
        )
        table.add_row(f"{fit.tensor} x {fit.pipeline}", weights, *cells)
    Console().print(table)
    print(f"Block tables: {described(layout.fits[0].layout)}")
    fitting = [fit for fit in layout.fits if fit.num_requests]
    if not fitting:
        raise ConfigError("no number of ranks has room for one request of full length")
    best = min(fitting, key=lambda fit: (len(fit.shares), fit.pipeline))
    sizes = f"--tensor-parallel-size {best.tensor} --pipeline-parallel-size {best.pipeline}"
    print(f"Fewest ranks with room for a request of full length: {sizes}")


def described(layout: KVLayout) -> str:
    """Return what the layers of a model keep, such as "1 of all tokens, 5 of the last 1,024"."""
    groups = [
        f"{len(group.tables)} of " + ("all tokens" if group.window is None else f"the last {group.window:,}")
        for group in layout.groups
    ]
    if layout.snapshot_blocks:
        groups.append(f"and snapshots of {layout.snapshot_blocks:,} blocks each")
    return ", ".join(groups)


def parse_gpus(text: str) -> tuple[int, int]:
    """Parse "4x80GB" as (4, 80e9)."""
    match = re.fullmatch(r"(\d+)\s*[xX]\s*(\S.*)", text.strip())
    if match is None or not 0 < int(match[1]) <= 1024:
        raise ConfigError(
            f"--gpus is {text!r}: it must be a number of GPUs and the memory of each, such as 4x80GB"
        )
    return int(match[1]), parse_size(match[2], "--gpus")


def parse_size(text: str, name: str) -> int:
    """Parse "80GB", "79.6GiB" or "80G" as bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(
            f"{name} has the size {text!r}: it must be a number of bytes, such as 80GB or 79.6GiB"
        )
    return int(float(match[1]) * _UNITS[match[2]])
