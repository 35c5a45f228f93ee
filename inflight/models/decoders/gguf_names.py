"""The names of tensors in GGUF files. They hardly depend on the architecture."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.decoders.predictor import MtpNames
from inflight.models.decoders.spec import DecoderSpec, WeightNames

_QKV = {part: f"attention.qkv.{part[-1]}" for part in ("attn_q", "attn_k", "attn_v")}
_INTERLEAVED = {**_QKV, "attn_q": "attention.qkv.q.interleaved", "attn_k": "attention.qkv.k.interleaved"}
_LAYER = {
    "attn_output": "attention.output",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_norm": "in_norm",
    "post_attention_norm": "mixer.out_norm",
    "ffn_norm": "mlp.in_norm",
    "post_ffw_norm": "mlp.out_norm",
    "ffn_gate": "mlp.gate_up.gate",
    "ffn_up": "mlp.gate_up.up",
    "ffn_down": "mlp.down",
    "ffn_gate_shexp": "mlp.shared.gate_up.gate",
    "ffn_up_shexp": "mlp.shared.gate_up.up",
    "ffn_down_shexp": "mlp.shared.down",
    "ffn_gate_inp_shexp": "mlp.shared_gate",
    "exp_probs_b.bias": "mlp.correction",
}
_STACKED = {
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.weight": "mlp.experts.gate",
    "ffn_up_exps.weight": "mlp.experts.up",
    "ffn_down_exps.weight": "mlp.experts.down",
    "ffn_gate_exps.bias": "mlp.experts.gate_bias",
    "ffn_up_exps.bias": "mlp.experts.up_bias",
    "ffn_down_exps.bias": "mlp.experts.down_bias",
}
# The layout of the first files with experts.
_INDEXED = {
    "ffn_gate_inp": "mlp.router",
    "ffn_gate.{}": "mlp.experts.gate",
    "ffn_up.{}": "mlp.experts.up",
    "ffn_down.{}": "mlp.experts.down",
}


def _without(names: dict[str, str], module: str) -> dict[str, str]:
    return {key: target for key, target in names.items() if key != module}


_OWN_LAYERS = {
    "phi3": _without(_LAYER, "ffn_gate") | {"attn_qkv": "attention.qkv", "ffn_up": "mlp.gate_up"},
    "gpt-oss": _QKV
    | _without(_LAYER, "ffn_norm")
    | {"post_attention_norm": "mlp.in_norm", "attn_sinks.weight": "attention.sinks"},
    "glm4moe": _QKV | _without(_LAYER, "ffn_norm") | {"post_attention_norm": "mlp.in_norm"},
}
_IGNORED = (r"^rope_freqs\.weight$", r"^rope_factors_(long|short)\.weight$", r"\.attn_rot_embd\.weight$")


def with_gguf_names(
    spec: DecoderSpec, architecture: str, interleaved: bool, num_extra_layers: int
) -> DecoderSpec:
    """Return the same decoder with weights in a GGUF file. Its norms hold what others hold as a difference from 1."""
    layer = _OWN_LAYERS.get(architecture, (_INTERLEAVED if interleaved else _QKV) | _LAYER)
    extra = tuple(rf"^blk\.{spec.num_layers + index}\." for index in range(num_extra_layers))
    names = WeightNames(
        layer,
        experts=(_STACKED, _INDEXED),
        prefixes=("",),
        layers="blk",
        heads=("output.weight",),
        embedding="token_embd.weight",
        final_norm="output_norm",
        ignored=_IGNORED + extra,
    )
    return replace(spec, names=names, norm_offset=0.0)


def gguf_predictor(names: WeightNames, num_layers: int) -> MtpNames:
    """Return the names of the layer that follows the others, given theirs."""
    module = f"blk.{num_layers}.nextn"
    layer = replace(names, first_layer=num_layers, final_norm=f"{module}.shared_head_norm")
    return MtpNames(layer, f"{module}.eh_proj", f"{module}.enorm", f"{module}.hnorm")
