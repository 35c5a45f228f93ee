"""Small random checkpoints of every family of encoders, written by transformers, and engines run over them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.config import EngineConfig
from inflight.events import Delta
from inflight.loading.engine import LoadedEngine
from inflight.loading.load import load_engine
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from tests.support.checkpoints import VOCAB_SIZE, randomise

HIDDEN, LONGEST = 64, 96

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
}
_DISTILBERT = {"dim": HIDDEN, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _SHAPE),
    "roberta": (
        "RobertaConfig",
        _SHAPE | {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    ),
    "xlm-roberta": (
        "XLMRobertaConfig",
        _SHAPE | {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1, "hidden_act": "gelu_new"},
    ),
    "distilbert": (
        "DistilBertConfig",
        _DISTILBERT | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": LONGEST},
    ),
    "modernbert": (
        "ModernBertConfig",
        _SHAPE | {"local_attention": 16, "num_hidden_layers": 4, "pad_token_id": 0},
    ),
}


def make_encoder(family: str, classifier: bool, **overrides: Any) -> Any:
    """A transformers model in float32, with random norms and biases too."""
    import transformers

    name, fixed = FAMILIES[family]
    auto = transformers.AutoModelForSequenceClassification if classifier else transformers.AutoModel
    model = auto.from_config(getattr(transformers, name)(**(fixed | overrides)))
    randomise(model, seed=3)
    return model.eval()


def write_pooling(folder: Path, modes: Sequence[str] | str = "mean", after: Sequence[str] = ()) -> Path:
    """The files of sentence-transformers that make an embedder of an encoder. `after`: modules after the pooling, whose
    folders are left empty."""
    kinds = ["Transformer", "Pooling", *after, "Normalize"]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    for index, kind in enumerate(kinds[1:-1], 1):
        (folder / f"{index}_{kind}").mkdir(exist_ok=True)
    config = {"embedding_dimension": HIDDEN, "pooling_mode": modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, **options: Any) -> LoadedEngine:
    """Load an engine, on the CPU unless the options name another device."""
    options = {"device": "cpu", "skip_tokenizer_init": True} | options
    return load_engine(EngineConfig.create(folder, **options))


def texts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def vectors(
    engine: LoadedEngine, prompts: Sequence[Sequence[int]], seconds: Sequence[int] = ()
) -> list[NDArray[np.float32]]:
    """Return the engine's vector for each prompt, all in one run. `seconds`: where the second texts of pairs begin."""
    deltas = run(engine, prompts, seconds)
    assert not [delta.error for delta in deltas if delta.error]
    return [np.frombuffer(delta.vector or b"", dtype=np.float32) for delta in deltas]


def run(engine: LoadedEngine, prompts: Sequence[Sequence[int]], seconds: Sequence[int] = ()) -> list[Delta]:
    core = engine.core
    deltas: dict[int, Delta] = {}
    for index, prompt in enumerate(prompts):
        core.add(
            Request.create(
                str(index),
                list(prompt),
                SamplingParams(),
                max_tokens=0,
                task="pool",
                splittable=False,
                second_segment=seconds[index] if seconds else 0,
            )
        )
    while core.has_work:
        deltas |= {int(delta.request_id): delta for delta in core.step()}
    return [deltas[index] for index in range(len(prompts))]


@torch.inference_mode()
def hidden_states(model: Any, prompt: Sequence[int]) -> Tensor:
    """[len(prompt), hidden] as transformers computes them."""
    states: Tensor = model(torch.tensor([list(prompt)])).last_hidden_state[0]
    return states


@torch.inference_mode()
def logits(model: Any, prompt: Sequence[int], second: int = 0) -> Tensor:
    """[labels] as transformers computes them."""
    more = {}
    if second:
        more["token_type_ids"] = (torch.arange(len(prompt)) >= second).long()[None]
    row_logits: Tensor = model(torch.tensor([list(prompt)]), **more).logits[0]
    return row_logits
