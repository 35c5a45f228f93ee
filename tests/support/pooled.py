"""Decoders with a head: small checkpoints, what transformers says of them, and an engine that pools and generates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from inflight.config import EngineConfig
from inflight.events import Delta
from inflight.loading.engine import LoadedEngine
from inflight.loading.load import load_engine
from inflight.models.decoders.decoder import Decoder
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from tests.support.checkpoints import FAMILIES, attention_of, make_model, randomise, write_tokenizer
from tests.support.steps import StepRecord, observe

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass
class PooledEngine:
    """A real engine, and all that it said."""

    loaded: LoadedEngine
    vectors: dict[str, bytes] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, Delta] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path | str, **options: Any) -> PooledEngine:
        engine = cls(load_engine(EngineConfig.create(folder, **options)))
        observe(engine.loaded.core, engine.records.append)
        return engine

    def add(self, name: str, token_ids: Sequence[int], max_tokens: int = 0) -> None:
        """Add a request, which is pooled if it generates no tokens."""
        task = "generate" if max_tokens else "pool"
        self.tokens[name] = []
        self.loaded.core.add(Request.create(name, list(token_ids), GREEDY, max_tokens, task=task))

    def score(self, name: str, token_ids: Sequence[int]) -> None:
        """Ask for the logprobs of a prompt."""
        self.tokens[name] = []
        params = SamplingParams(temperature=0, prompt_logprobs=0)
        self.loaded.core.add(Request.create(name, list(token_ids), params, 0, task="prompt_logprobs"))

    def run(self) -> None:
        core = self.loaded.core
        while core.has_work:
            for delta in core.step():
                self.tokens[delta.request_id] += delta.token_ids
                if delta.vector is not None:
                    assert delta.request_id not in self.vectors, "a vector comes once"
                    self.vectors[delta.request_id] = delta.vector
                if delta.finish_reason:
                    self.ended[delta.request_id] = delta

    def pool(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """[texts, size]"""
        for index, ids in enumerate(texts):
            self.vectors.pop(str(index), None)
            self.add(str(index), ids)
        self.run()
        return np.array([self.vector(str(index)) for index in range(len(texts))])

    def vector(self, name: str) -> NDArray[np.float32]:
        assert self.ended[name].finish_reason == "stop", self.ended[name].error
        assert self.tokens[name] == []
        return np.frombuffer(self.vectors[name], dtype=np.float32)

    @property
    def decoder(self) -> Decoder:
        assert isinstance(self.loaded.model, Decoder)
        return self.loaded.model

    @property
    def num_computed(self) -> int:
        return sum(slot.num_tokens for record in self.records for slot in record.slots)


# ---- checkpoints ----


def write_reranker(folder: Path, **overrides: Any) -> Path:
    """A Qwen3 whose tokenizer has the template's special tokens, and "no" and "yes" as tokens."""
    import tokenizers

    make_model("qwen3", **overrides).save_pretrained(folder)
    write_tokenizer(folder, vocab_size=300)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<think>", "</think>", "no", "yes"])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def write_classifier(folder: Path, family: str, num_labels: int, **overrides: Any) -> Path:
    import transformers

    config = FAMILIES[family](num_labels=num_labels, **overrides)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    randomise(model)
    model.save_pretrained(folder)
    return folder


def write_embedder(folder: Path, dense: int = 0) -> Path:
    """A Qwen3 as Qwen3-Embedding stores it: a causal model's config, and a base model's tensors. With `dense`, a layer
    of so many features comes behind it."""
    import transformers

    model = transformers.AutoModel.from_config(FAMILIES["qwen3"]())
    randomise(model)
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["Qwen3ForCausalLM"]}))
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    modules = [
        {
            "idx": index,
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    _write_module(folder / "1_Pooling", {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True})
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 128}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "Query: "}}))
    if dense:
        config = {
            "in_features": 64,
            "out_features": dense,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        _write_module(folder / "2_Dense", config | {"bias": True})
        generator = torch.Generator().manual_seed(8)
        weight, bias = torch.randn(dense, 64, generator=generator), torch.randn(dense, generator=generator)
        save_file(
            {"linear.weight": weight * 0.1, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors"
        )
    return folder


def _write_module(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


# ---- what transformers says ----


def _attention(folder: Path) -> str | None:
    import transformers

    return attention_of(transformers.AutoConfig.from_pretrained(folder))


@torch.inference_mode()
def transformers_embeddings(folder: Path, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """The last token of each text, through the dense layer where there is one; not normalised."""
    import transformers

    model = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=_attention(folder)
    ).eval()
    last = torch.stack([model(torch.tensor([list(ids)])).last_hidden_state[0, -1] for ids in texts])
    file = folder / "2_Dense" / "model.safetensors"
    if file.exists():
        layer = load_file(file)
        last = torch.tanh(last @ layer["linear.weight"].T + layer["linear.bias"])
    return last.numpy()


@torch.inference_mode()
def transformers_labels(folder: Path, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """One text at a time."""
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=_attention(folder)
    )
    model.eval()
    return np.array([model(torch.tensor([list(ids)])).logits[0].numpy() for ids in texts])


@torch.inference_mode()
def transformers_next(folder: Path, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """The logits that follow each text."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=_attention(folder)
    ).eval()
    return np.array([model(torch.tensor([list(ids)])).logits[0, -1].numpy() for ids in texts])


def random_texts(*lengths: int, shared: int = 0, vocab_size: int = 290) -> list[list[int]]:
    """Return texts of these lengths, all of which begin with the same `shared` tokens."""
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        token_ids: list[int] = torch.randint(vocab_size, (count,), generator=generator).tolist()
        return token_ids

    beginning = ids(shared)
    return [beginning + ids(length - shared) for length in lengths]
