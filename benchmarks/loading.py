"""How long a checkpoint takes to load, and how much host memory that needs at most.

    python -m benchmarks.loading --shape qwen3-moe-small
    python -m benchmarks.loading --shape qwen3-30b-a3b --layers 4

Writes a checkpoint of random weights, one file for each layer, and loads it in its own process. Memory is what that
process holds beyond what it held before, without mapped files: the kernel takes back their pages when it needs memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.report import show
from benchmarks.shapes import SHAPES
from inflight.config import EngineConfig
from inflight.layers.torch_kernels import TorchKernels
from inflight.loading.load import load_engine
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.footprint import META, meta_decoder
from inflight.models.decoders.spec import whole_shard
from inflight.models.decoders.weights import placements


def write(folder: Path, config: dict[str, Any]) -> list[int]:
    """Write a checkpoint in bfloat16. Return the bytes of each file, which holds a layer or what is in none."""
    decoder = meta_decoder(
        whole_shard(decoder_spec(config)), TorchKernels(torch.bfloat16, META), torch.bfloat16
    )
    shapes: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for placement in placements(decoder):
        layer = placement.name.partition(".layers.")[2].partition(".")[0] or "rest"
        shapes[layer][placement.name] = placement.shape
    files, sizes = {}, []
    for number, (layer, tensors) in enumerate(shapes.items()):
        name = f"model-{number + 1:05}-of-{len(shapes):05}.safetensors"
        random = {key: torch.randn(shape).to(torch.bfloat16) * 0.02 for key, shape in tensors.items()}
        save_file(random, folder / name)
        files[layer] = name
        sizes.append(sum(tensor.nbytes for tensor in random.values()))
    index = {key: files[layer] for layer, tensors in shapes.items() for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return sizes


def held() -> int:
    """Return the bytes that this process holds, without mapped files."""
    lines = map(str.split, Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


def load(folder: str, device: str) -> None:
    """Load the checkpoint and print seconds and bytes as JSON."""
    config = EngineConfig.create(
        folder, device=device, dtype="bfloat16", skip_tokenizer_init=True, num_blocks=64, max_model_len=256
    )
    if device == "cuda":
        torch.zeros(1, device="cuda")  # the memory of CUDA itself
    before, peak, loaded = held(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not loaded.wait(0.002):
            peak = max(peak, held())

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    engine = load_engine(config)
    seconds = time.perf_counter() - start
    loaded.set()
    thread.join()
    print(json.dumps({"seconds": seconds, "peak": max(peak, held()) - before}))
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-moe-small")
    parser.add_argument("--layers", type=int, help="instead of all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of the child process
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.folder is not None:
        load(options.folder, options.device)
        return
    config = SHAPES[options.shape] | ({"num_hidden_layers": options.layers} if options.layers else {})
    with tempfile.TemporaryDirectory() as folder:
        sizes = write(Path(folder), config)
        child = [sys.executable, "-m", "benchmarks.loading", "--device", options.device, "--folder", folder]
        output = subprocess.run(child, check=True, capture_output=True, text=True).stdout
    measured = json.loads(output.splitlines()[-1])
    gib = 1 << 30
    result = {
        "shape": options.shape,
        "device": options.device,
        "checkpoint_gib": sum(sizes) / gib,
        "largest_file_gib": max(sizes) / gib,
        "seconds": measured["seconds"],
        "peak_host_gib": measured["peak"] / gib,
    }
    show("Loading", list(result), [list(result.values())], options.json, result)


if __name__ == "__main__":
    main()
