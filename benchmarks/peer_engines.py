"""One engine in its own process, for `benchmarks.cpu_peers`: it reads workloads and writes what they took.

    python -m benchmarks.peer_engines openvino --options '{"folder": "model-ov", "threads": 2}'

Each line of standard input is a workload as JSON, and each line of standard output its result, after a first line with
the engine's version. Other engines are installed elsewhere: their interpreters need no package of this project, so
modules are imported where they are used.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

Prompts = Sequence[Sequence[int]]


class Steps:
    """When each step ended, in seconds since the first request was submitted, and how many tokens it produced."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.ends: list[float] = []
        self.num_tokens: list[int] = []

    def add(self, num_tokens: int, end: float | None = None) -> None:
        self.ends.append((time.monotonic() if end is None else end) - self.start)
        self.num_tokens.append(num_tokens)

    def result(self) -> dict[str, Any]:
        seconds = time.monotonic() - self.start
        return {"seconds": seconds, "ends": self.ends, "num_tokens": self.num_tokens}


class Generator(Protocol):
    """Generates greedily, ignoring EOS, from prompts that are submitted at once."""

    version: str

    def generate(self, prompts: Prompts, output_lens: Sequence[int]) -> Steps: ...


class Embedder(Protocol):
    version: str

    def embed(self, texts: Sequence[str]) -> Any: ...


class Inflight:
    def __init__(self, model: str, **options: Any) -> None:
        import inflight

        self.version = f"inflight {inflight.__version__}"
        self._llm = inflight.LLM(model, device="cpu", show_progress=False, **options)

    def generate(self, prompts: Prompts, output_lens: Sequence[int]) -> Steps:
        from inflight import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in output_lens
        ]
        steps = Steps()
        with self._llm.recorded() as recorded:
            self._llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        for step in recorded:
            steps.add(step.num_outputs, step.times.finished_at)
        return steps

    def embed(self, texts: Sequence[str]) -> Any:
        return self._llm.embed(list(texts), use_tqdm=False)


class OpenVino:
    """OpenVINO GenAI's pipeline for continuous batching."""

    def __init__(self, folder: str, threads: int, properties: dict[str, Any], most_tokens: int) -> None:
        import openvino_genai

        self.version = f"OpenVINO GenAI {openvino_genai.__version__}"
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = most_tokens
        scheduler.cache_size = 1  # GiB
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads, **properties}
        )
        self._num_requests = 0

    def generate(self, prompts: Prompts, output_lens: Sequence[int]) -> Steps:
        import numpy as np
        import openvino
        import openvino_genai

        steps, handles = Steps(), []
        for prompt, length in zip(prompts, output_lens, strict=True):
            config = openvino_genai.GenerationConfig(
                max_new_tokens=length, ignore_eos=True, eos_token_id=0, do_sample=False
            )
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._num_requests, ids, config))
            self._num_requests += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            outputs = [handle.read() for handle in handles if handle.can_read()]
            steps.add(sum(len(each.generated_ids) for output in outputs for each in output.values()))
        return steps


class LlamaCpp:
    """llama.cpp's library: a step is one call with a token of every running sequence, prompts first."""

    MAX_SEQUENCES = 16
    LENGTH = 272  # tokens of a sequence

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        self.version = f"llama.cpp of llama-cpp-python {llama_cpp.__version__}"
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = self.MAX_SEQUENCES
        params.n_ctx = self.MAX_SEQUENCES * self.LENGTH
        params.n_batch = params.n_ctx
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def generate(self, prompts: Prompts, output_lens: Sequence[int]) -> Steps:
        import numpy as np

        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        steps = Steps()
        inputs = {sequence: list(prompt) for sequence, prompt in enumerate(prompts)}
        lengths = dict.fromkeys(inputs, 0)  # tokens in the KV cache
        left = dict(enumerate(output_lens))
        while inputs:
            last = {sequence: self._append(sequence, tokens, lengths) for sequence, tokens in inputs.items()}
            status = api.llama_decode(self._context, self._batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            self._batch.n_tokens = 0
            for sequence, index in last.items():
                logits = api.llama_get_logits_ith(self._context, index)
                token = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
                inputs[sequence] = [token]
                left[sequence] -= 1
                if not left[sequence]:
                    del inputs[sequence]
                    api.llama_memory_seq_rm(api.llama_get_memory(self._context), sequence, -1, -1)
            steps.add(len(last))
        return steps

    def _append(self, sequence: int, tokens: list[int], lengths: dict[int, int]) -> int:
        """Put tokens of a sequence into the batch, and return the index of the last one, whose logits are computed."""
        batch = self._batch
        for token in tokens:
            index = batch.n_tokens
            batch.token[index] = token
            batch.pos[index] = lengths[sequence]
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = False
            batch.n_tokens += 1
            lengths[sequence] += 1
        batch.logits[index] = True
        return int(index)


class SentenceTransformers:
    def __init__(self, folder: str, threads: int) -> None:
        import sentence_transformers
        import torch

        torch.set_num_threads(threads)
        self.version = f"sentence-transformers {sentence_transformers.__version__}"
        self._model = sentence_transformers.SentenceTransformer(folder, device="cpu")

    def embed(self, texts: Sequence[str]) -> Any:
        return self._model.encode(list(texts), show_progress_bar=False)


def export_openvino(source: str, target: str, int8: bool) -> None:
    """Convert a checkpoint for OpenVINO, its matrices as they are or in int8."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    config = OVWeightQuantizationConfig(bits=8) if int8 else None
    model = OVModelForCausalLM.from_pretrained(
        source, export=True, compile=False, load_in_8bit=False, quantization_config=config
    )
    model.save_pretrained(target)


def quantize_gguf(source: str, target: str, kind: str, threads: int) -> None:
    """Quantize a GGUF file as llama.cpp does, to "Q8_0" or "Q4_K_M"."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = threads
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
    if status:
        Path(target).unlink(missing_ok=True)
        raise RuntimeError(f"llama_model_quantize returned {status} for {kind}")


ENGINES: dict[str, Callable[..., Generator | Embedder]] = {
    "inflight": Inflight,
    "openvino": OpenVino,
    "llama.cpp": LlamaCpp,
    "sentence-transformers": SentenceTransformers,
}
TASKS: dict[str, Callable[..., None]] = {"export-openvino": export_openvino, "quantize-gguf": quantize_gguf}


def serve(engine: Any, answers: TextIO) -> None:
    print(json.dumps({"version": engine.version}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        if "texts" in work:
            start = time.monotonic()
            engine.embed(work["texts"])
            result: dict[str, Any] = {"seconds": time.monotonic() - start}
        else:
            result = engine.generate(work["prompts"], work["output_lens"]).result()
        print(json.dumps(result), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=(*ENGINES, *TASKS))
    parser.add_argument("--options", type=json.loads, default={}, help="arguments of the engine, as JSON")
    arguments = parser.parse_args()
    # Libraries print, too: what they write to standard output goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if arguments.engine in TASKS:
        TASKS[arguments.engine](**arguments.options)
    else:
        serve(ENGINES[arguments.engine](**arguments.options), answers)


if __name__ == "__main__":
    main()
