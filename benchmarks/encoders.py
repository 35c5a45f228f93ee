"""How many texts per second an encoder takes, beside transformers in the same run: texts sorted by length and padded.

    python -m benchmarks.encoders --shape minilm-l6 --threads 2
    python -m benchmarks.encoders --shape bge-reranker-large --texts 24
    python -m benchmarks.encoders --shape bge-reranker-large --device cuda --json

Weights are random and shared by both; texts are random ids of uniform random length. transformers gets its batches
padded and as tensors, before its time begins, and runs at the best of `--batch` sizes; inflight gets lists of ids in no
order. The two take turns `--repeat` times. What is reported are medians, the median of the turns' ratios, the
share of places that transformers computed for padding, and how far the two results lie apart at most. What is known is
told as soon as it is, and after `--seconds` no further batch size or turn is begun.

Few texts sort badly: on a CPU small batch sizes are tried as well then, so that the other side is not measured by its
padding. On a GPU they would take most of the time and win nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.report import Progress, show
from inflight import LLM

Floats = NDArray[np.float32]
VOCAB = 32_768  # a lookup costs the same in a larger one
PAD = 1
COMMON = {"vocab_size": VOCAB, "hidden_act": "gelu", "pad_token_id": PAD}


@dataclass(frozen=True, slots=True)
class EncoderShape:
    family: str
    config: dict[str, Any]
    low: int  # tokens of the shortest text
    high: int  # and of the longest
    embeds: bool  # mean pooling to a unit vector; otherwise one logit from the first token


SHAPES = {
    "minilm-l6": EncoderShape(
        family="bert",
        config={
            "hidden_size": 384,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "intermediate_size": 1536,
            "max_position_embeddings": 512,
            "layer_norm_eps": 1e-12,
        },
        low=10,
        high=250,
        embeds=True,
    ),
    "bge-reranker-large": EncoderShape(
        family="xlm-roberta",
        config={
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
            "num_labels": 1,
        },
        low=10,
        high=500,
        embeds=False,
    ),
}
# Small enough to try the benchmark out.
SHAPES["tiny"] = EncoderShape(
    "bert",
    {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,
    },
    low=10,
    high=100,
    embeds=True,
)


def make_model(shape: EncoderShape, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.family, **COMMON, **shape.config)
    kind = AutoModel if shape.embeds else AutoModelForSequenceClassification
    options = {"add_pooling_layer": False} if shape.embeds else {}
    with device:  # a GPU makes so many random numbers in no time
        model = kind.from_config(config, attn_implementation="sdpa", dtype=dtype, **options)
    return model.to(device).eval()


def write_checkpoint(model: Any, shape: EncoderShape, folder: Path) -> None:
    """As the hub has it: sentence-transformers' files beside the weights of an embedder."""
    model.save_pretrained(folder)
    if not shape.embeds:
        return
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path, _ in kinds[1:]:
        (folder / path).mkdir()
    pooling = {"word_embedding_dimension": shape.config["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_texts(shape: EncoderShape, count: int) -> list[list[int]]:
    draw = random.Random(1)
    return [
        [draw.randrange(1000, VOCAB) for _ in range(draw.randint(shape.low, shape.high))]
        for _ in range(count)
    ]


class Padded:
    """transformers over texts sorted by length, `size` at a time, each batch padded to its longest."""

    def __init__(self, model: Any, shape: EncoderShape, texts: list[list[int]], size: int) -> None:
        self._model, self._shape = model, shape
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
        self._batches: list[tuple[list[int], Tensor, Tensor]] = []
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            ids = torch.full((len(chosen), len(texts[chosen[0]])), PAD)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(chosen):
                ids[row, : len(texts[index])] = torch.tensor(texts[index])
                mask[row, : len(texts[index])] = 1
            self._batches.append((chosen, ids, mask))
        self.size = size
        self.padding = 1 - sum(map(len, texts)) / sum(ids.numel() for _, ids, _ in self._batches)

    @torch.inference_mode()
    def __call__(self) -> Floats:
        """[texts, size of a vector], in the order of the texts."""
        found, order = [], []
        for chosen, ids, mask in self._batches:
            order += chosen
            ids, mask = ids.to(self._model.device), mask.to(self._model.device)
            out = self._model(input_ids=ids, attention_mask=mask)
            if self._shape.embeds:
                weights = mask.unsqueeze(-1).to(out.last_hidden_state.dtype)
                mean = (out.last_hidden_state * weights).sum(1) / weights.sum(1)
                found.append(torch.nn.functional.normalize(mean.float(), dim=-1))
            else:
                found.append(out.logits.float())
        vectors = torch.cat(found).cpu().numpy()
        result = np.empty_like(vectors)
        result[order] = vectors
        return result


class Packed:
    """inflight over texts as they come."""

    def __init__(self, llm: LLM, shape: EncoderShape, texts: list[list[int]]) -> None:
        self._llm, self._shape, self._texts = llm, shape, texts

    def __call__(self) -> Floats:
        if self._shape.embeds:
            return np.stack(
                [output.outputs.vector for output in self._llm.embed(self._texts, use_tqdm=False)]
            )
        # As the head gives it: a sigmoid would hide differences.
        scored = self._llm.classify(self._texts, use_tqdm=False, scale="logit")
        return np.stack([output.outputs.vector for output in scored])


def timed(run: Callable[[], Floats]) -> tuple[float, Floats]:
    start = time.perf_counter()
    result = run()  # its last act is to bring the vectors to the host
    return time.perf_counter() - start, result


def best_batch(
    model: Any, shape: EncoderShape, texts: list[list[int]], sizes: list[int], progress: Progress
) -> Padded:
    """The fastest of two runs each, after one that warms up."""
    contenders: dict[Padded, float] = {}
    for size in (size for size in sizes if size <= len(texts)):
        padded = Padded(model, shape, texts, size)
        if not contenders:
            padded()
        contenders[padded] = seconds = min(timed(padded)[0] for _ in range(2))
        progress.tell(f"transformers, batch {size}: {len(texts) / seconds:,.0f} texts/s")
        if progress.is_late:
            break
    return min(contenders, key=contenders.__getitem__)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    on_gpu = options.device != "cpu"
    shape, device = SHAPES[options.shape], torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    texts = make_texts(shape, options.texts)
    sizes = options.batch or ([64, 128] if on_gpu else [8, 16, 32, 64])
    if not options.batch and not on_gpu and options.texts < 8 * max(sizes):
        sizes = [1, 2, 4, *sizes]
    progress = Progress(options.seconds)
    model = make_model(shape, dtype, device)
    write_checkpoint(model, shape, folder)
    progress.tell("the model is written")
    with LLM(
        str(folder),
        dtype=str(dtype).removeprefix("torch."),
        device=options.device,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        skip_tokenizer_init=True,
        show_progress=False,
    ) as llm:
        progress.tell("the engine is ready")
        ours = Packed(llm, shape, texts)
        for _ in range(2):  # the first warms up
            progress.tell(f"inflight: {len(texts) / timed(ours)[0]:,.0f} texts/s")
        theirs = best_batch(model, shape, texts, sizes, progress)
        times: list[tuple[float, float]] = []
        apart = 0.0
        while not times or (len(times) < options.repeat and not progress.is_late):
            (mine, found), (other, expected) = timed(ours), timed(theirs)
            times.append((mine, other))
            apart = max(apart, float(np.abs(found - expected).max()))
            rates = [len(texts) / seconds for seconds in times[-1]]
            progress.tell("in turns: inflight {:,.0f} texts/s, transformers {:,.0f}".format(*rates))
    rates = [len(texts) / statistics.median(column) for column in zip(*times, strict=True)]
    return {
        "shape": options.shape,
        "device": torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads",
        "dtype": str(dtype),
        "texts": len(texts),
        "tokens": sum(map(len, texts)),
        "inflight_texts_per_s": rates[0],
        "transformers_texts_per_s": rates[1],
        "transformers_batch": theirs.size,
        "transformers_padding": theirs.padding,
        "ratio": statistics.median(other / mine for mine, other in times),
        "max_difference": apart,
        "runs": [{"inflight": mine, "transformers": other} for mine, other in times],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="minilm-l6")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU")
    add("--threads", type=int, help="CPU threads of both (default: one per core)")
    add("--texts", type=int, default=1000)
    add("--batch", type=int, nargs="+", help="batch sizes that transformers may choose from")
    add("--repeat", type=int, default=3)
    add("--max-num-batched-tokens", type=int)
    add("--max-num-seqs", type=int)
    add("--seconds", type=float, default=90.0, help="after which no batch size and no turn is begun")
    add("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read when the thread team starts
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    name = f"{result['shape']}, {result['texts']} texts of {result['tokens']} tokens, {result['device']}"
    rows = [
        ("inflight, packed", result["inflight_texts_per_s"], "-", result["ratio"]),
        (
            f"transformers, sorted, batch {result['transformers_batch']}",
            result["transformers_texts_per_s"],
            result["transformers_padding"],
            1.0,
        ),
    ]
    show(name, ("", "texts/s", "padding", "ratio"), rows, options.json, {"benchmark": "encoders", **result})


if __name__ == "__main__":
    main()
