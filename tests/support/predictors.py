"""Small random layers that predict further tokens, as checkpoints that have them store them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import VOCAB_SIZE, make_model, randomise

# Families with such a layer, and the fields that say so.
PREDICTORS: dict[str, dict[str, Any]] = {
    "qwen3-next": {},
    "qwen3.5": {"mtp_num_hidden_layers": 1},
    "qwen3.5-moe": {"mtp_num_hidden_layers": 1},
    "glm4-moe": {"num_nextn_predict_layers": 1},
}

_QWEN = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "post_norm": "mtp.norm",
    "mtp_block": "mtp.layers.0",
}
_GLM = {name: f"model.layers.3.{name}" for name in ("eh_proj", "enorm", "hnorm")}
_GLM |= {"post_norm": "model.layers.3.shared_head.norm", "mtp_block": "model.layers.3"}


def make_predictor(model: Any, seed: int = 1) -> Any:
    """Return the layer of transformers for this model, with random weights."""
    from transformers.modeling_layers import MtpModel

    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    model.config.mtp_mlp_layer_types = ["sparse"]
    layer = MtpModel(model, 1).layers[0]
    randomise(layer, seed)
    return layer.eval()


def write_predictor(folder: Path, family: str, layer: Any) -> None:
    """Add the layer to the checkpoint of its model."""
    names = _GLM if family == "glm4-moe" else _QWEN
    tensors: dict[str, Tensor] = {}
    for name, tensor in layer.state_dict().items():
        module, _, rest = name.partition(".")
        tensors[f"{names[module]}.{rest}"] = tensor.clone()
    edit_tensors(folder, tensors)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | PREDICTORS[family]))


def edit_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    file = folder / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(file).items()}
    dtype = next(iter(stored.values())).dtype
    save_file(stored | {name: tensor.to(dtype) for name, tensor in tensors.items()}, file, {"format": "pt"})


def write_with_predictor(folder: Path, family: str, seed: int = 0, **overrides: Any) -> tuple[Any, Any]:
    """Write a random checkpoint with such a layer, and return transformers' model and layer."""
    model = make_model(family, seed, **overrides)
    model.save_pretrained(folder)
    layer = make_predictor(model)
    write_predictor(folder, family, layer)
    return model, layer


@torch.inference_mode()
def predicted_states(model: Any, layer: Any, token_ids: list[int], guesses: list[int]) -> Tensor:
    """Return the layer's states [len(guesses) + len(token_ids) - 1, hidden_size] in the model's precision: for the
    tokens behind the first, and then for guesses of what follows, each from the state before it."""
    base = model.get_decoder()
    hidden = base(torch.tensor([token_ids])).last_hidden_state[:, :-1]
    states = hidden
    following = token_ids[1:]
    for number in range(len(guesses) + 1):
        embedded = base.embed_tokens(torch.tensor([following]))
        positions = torch.arange(len(following))[None]
        rotated = positions.expand(3, 1, -1) if "Qwen3_5" in type(base).__name__ else positions
        states = layer(
            embedded,
            hidden,
            position_embeddings=base.rotary_emb(embedded, rotated),
            attention_mask=None,
            position_ids=positions,
            past_key_values=None,
        )
        if number < len(guesses):
            following, hidden = [*following, guesses[number]], torch.cat((hidden, states[:, -1:]), dim=1)
    last: Tensor = states[0]
    return last


# ---- EAGLE-3 ----

HIDDEN, HEADS, KV_HEADS, DIM, INNER, DRAFT_VOCAB, EPS = 64, 4, 2, 16, 96, 100, 1e-5
LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_theta": 1000.0,
}


def write_eagle(
    folder: Path, layers: str = "midlayer", nested: bool = False, own_embedding: bool = False, **fields: Any
) -> dict[str, Tensor]:
    """Write a random checkpoint, and return its tensors."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int, scale: float = 0.12) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        f"{layers}.input_layernorm.weight": 1 + random(HIDDEN, scale=0.3),
        f"{layers}.hidden_norm.weight": 1 + random(HIDDEN, scale=0.3),
        f"{layers}.post_attention_layernorm.weight": 1 + random(HIDDEN, scale=0.3),
        f"{layers}.self_attn.q_proj.weight": random(HEADS * DIM, 2 * HIDDEN),
        f"{layers}.self_attn.k_proj.weight": random(KV_HEADS * DIM, 2 * HIDDEN),
        f"{layers}.self_attn.v_proj.weight": random(KV_HEADS * DIM, 2 * HIDDEN),
        f"{layers}.self_attn.o_proj.weight": random(HIDDEN, HEADS * DIM),
        f"{layers}.mlp.gate_proj.weight": random(INNER, HIDDEN),
        f"{layers}.mlp.up_proj.weight": random(INNER, HIDDEN),
        f"{layers}.mlp.down_proj.weight": random(HIDDEN, INNER),
        "norm.weight": 1 + random(HIDDEN, scale=0.3),
        "lm_head.weight": random(DRAFT_VOCAB, HIDDEN),
    }
    known = torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = known - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, known, True)
    if own_embedding:
        tensors["embed_tokens.weight"] = random(VOCAB_SIZE, HIDDEN)
    config: dict[str, Any] = {"draft_vocab_size": DRAFT_VOCAB}
    if nested:
        config |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        config["transformer_layer_config"] = LLAMA
    else:
        config |= LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}
    (folder / "config.json").write_text(json.dumps(config | fields))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors
