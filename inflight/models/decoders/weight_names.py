"""How checkpoints of the families name their tensors, and which part of a decoder each is loaded into."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.decoders.predictor import MtpNames
from inflight.models.decoders.spec import IGNORED, WeightNames

ATTENTION = {
    "self_attn.q_proj": "attention.qkv.q",
    "self_attn.k_proj": "attention.qkv.k",
    "self_attn.v_proj": "attention.qkv.v",
    "self_attn.o_proj": "attention.output",
}
QK_NORM = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
MLP = {
    "mlp.gate_proj": "mlp.gate_up.gate",
    "mlp.up_proj": "mlp.gate_up.up",
    "mlp.down_proj": "mlp.down",
}
PRE_NORMS = {"input_layernorm": "in_norm", "post_attention_layernorm": "mlp.in_norm"}
POST_NORMS = {"post_attention_layernorm": "mixer.out_norm", "post_feedforward_layernorm": "mlp.out_norm"}
BOTH_NORMS = {
    "input_layernorm": "in_norm",
    "pre_feedforward_layernorm": "mlp.in_norm",
    **POST_NORMS,
}

LLAMA = WeightNames(ATTENTION | MLP | PRE_NORMS)
QWEN3 = WeightNames(ATTENTION | QK_NORM | MLP | PRE_NORMS)
OLMO2 = WeightNames(ATTENTION | QK_NORM | MLP | POST_NORMS)
PHI3 = WeightNames(
    {
        "self_attn.qkv_proj": "attention.qkv",
        "self_attn.o_proj": "attention.output",
        "mlp.gate_up_proj": "mlp.gate_up",
        "mlp.down_proj": "mlp.down",
    }
    | PRE_NORMS
)
INDEXED = {
    "mlp.gate": "mlp.router",
    "mlp.experts.{}.gate_proj": "mlp.experts.gate",
    "mlp.experts.{}.up_proj": "mlp.experts.up",
    "mlp.experts.{}.down_proj": "mlp.experts.down",
}
STACKED = {
    "mlp.gate": "mlp.router",
    "mlp.experts.gate_up_proj": "mlp.experts.gate_up",
    "mlp.experts.down_proj": "mlp.experts.down",
}
TRANSPOSED = {
    "mlp.gate": "mlp.router",
    "mlp.experts.gate_up_proj": "mlp.experts.gate_up.transposed",
    "mlp.experts.down_proj": "mlp.experts.down.transposed",
}
EXPERTS = (INDEXED, STACKED, TRANSPOSED)
MIXTRAL_EXPERTS = {
    "block_sparse_moe.gate": "mlp.router",
    "block_sparse_moe.experts.{}.w1": "mlp.experts.gate",
    "block_sparse_moe.experts.{}.w3": "mlp.experts.up",
    "block_sparse_moe.experts.{}.w2": "mlp.experts.down",
}
GRANITE_EXPERTS = {
    "block_sparse_moe.router.layer": "mlp.router",
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down",
}
GRANITE_RENAMED = {
    "block_sparse_moe.router": "mlp.router",
    "block_sparse_moe.experts.gate_up_proj": "mlp.experts.gate_up",
    "block_sparse_moe.experts.down_proj": "mlp.experts.down",
}
QWEN2_SHARED = {
    "mlp.shared_expert.gate_proj": "mlp.shared.gate_up.gate",
    "mlp.shared_expert.up_proj": "mlp.shared.gate_up.up",
    "mlp.shared_expert.down_proj": "mlp.shared.down",
    "mlp.shared_expert_gate": "mlp.shared_gate",
}
GLM_SHARED = {
    "mlp.shared_experts.gate_proj": "mlp.shared.gate_up.gate",
    "mlp.shared_experts.up_proj": "mlp.shared.gate_up.up",
    "mlp.shared_experts.down_proj": "mlp.shared.down",
    "mlp.gate.e_score_correction_bias": "mlp.correction",
}
QWEN3_MOE = replace(QWEN3, experts=EXPERTS)
QWEN2_MOE = WeightNames(ATTENTION | MLP | PRE_NORMS | QWEN2_SHARED, experts=EXPERTS)
MIXTRAL = WeightNames(ATTENTION | PRE_NORMS, experts=(MIXTRAL_EXPERTS, STACKED, TRANSPOSED))
OLMOE = WeightNames(ATTENTION | QK_NORM | PRE_NORMS, experts=EXPERTS)
GLM4_MOE = WeightNames(ATTENTION | QK_NORM | MLP | PRE_NORMS | GLM_SHARED, experts=EXPERTS)
GRANITE_MOE = WeightNames(ATTENTION | PRE_NORMS, experts=(GRANITE_EXPERTS, GRANITE_RENAMED))
GEMMA3_LAYER = ATTENTION | QK_NORM | MLP | BOTH_NORMS
GEMMA3 = WeightNames(GEMMA3_LAYER)
GEMMA3_VISION = WeightNames(
    GEMMA3_LAYER,
    prefixes=("language_model.model.", "model.language_model."),
    heads=("language_model.lm_head.weight", "lm_head.weight"),
    ignored=(*IGNORED, r"^(model\.)?(vision_tower|multi_modal_projector)\."),
)
_VISION = r"^(model\.)?(vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio)\."
_LAYER_INPUTS = {
    "per_layer_input_gate": "input.gate",
    "per_layer_projection": "input.projection",
    "post_per_layer_input_norm": "input.norm",
}
_NORMED_EXPERTS = {
    "pre_feedforward_layernorm_2": "mlp.expert_norm",
    "post_feedforward_layernorm_1": "mlp.dense_out_norm",
    "post_feedforward_layernorm_2": "mlp.expert_out_norm",
    "router.scale": "mlp.router_norm",
    "router.per_expert_scale": "mlp.expert_scales",
}
GEMMA4_EXPERTS = {
    "router.proj": "mlp.router",
    "experts.gate_up_proj": "mlp.experts.gate_up",
    "experts.down_proj": "mlp.experts.down",
}
GEMMA4 = WeightNames(
    GEMMA3_LAYER | {"layer_scalar": "scale"} | _LAYER_INPUTS | _NORMED_EXPERTS,
    experts=(GEMMA4_EXPERTS,),
    ignored=(*IGNORED, r"self_attn\.v_norm\.weight$"),
)
GEMMA4_VISION = replace(GEMMA4, prefixes=("model.language_model.",), ignored=(*GEMMA4.ignored, _VISION))
GEMMA2 = WeightNames(ATTENTION | MLP | BOTH_NORMS)
GPT_OSS = WeightNames(
    ATTENTION | {"self_attn.sinks": "attention.sinks"} | PRE_NORMS,
    experts=(
        {
            "mlp.router": "mlp.router",
            "mlp.experts.gate_up_proj": "mlp.experts.gate_up.alternating",
            "mlp.experts.gate_up_proj_bias": "mlp.experts.gate_up_bias",
            "mlp.experts.down_proj": "mlp.experts.down.transposed",
            "mlp.experts.down_proj_bias": "mlp.experts.down_bias",
        },
    ),
)
_DELTA_NET = {
    "linear_attn.conv1d.weight": "delta_net.conv",
    "linear_attn.A_log": "delta_net.a_log",
    "linear_attn.dt_bias": "delta_net.dt_bias",
    "linear_attn.norm": "delta_net.norm",
    "linear_attn.out_proj": "delta_net.output",
}
_GROUPED_NET = _DELTA_NET | {
    "linear_attn.in_proj_qkvz": "delta_net.in.qkvz",
    "linear_attn.in_proj_ba": "delta_net.in.ba",
}
_SEPARATE_NET = _DELTA_NET | {
    "linear_attn.in_proj_qkv": "delta_net.in.qkv",
    "linear_attn.in_proj_z": "delta_net.in.z",
    "linear_attn.in_proj_b": "delta_net.in.b",
    "linear_attn.in_proj_a": "delta_net.in.a",
}
_FURTHER_TOKENS = r"^mtp\."  # modules that predict further tokens
_QWEN_LAYER = ATTENTION | QK_NORM | MLP | PRE_NORMS | QWEN2_SHARED
QWEN3_NEXT = WeightNames(_QWEN_LAYER | _GROUPED_NET, experts=EXPERTS, ignored=(*IGNORED, _FURTHER_TOKENS))
QWEN3_5 = WeightNames(
    _QWEN_LAYER | _SEPARATE_NET, experts=EXPERTS, ignored=(*IGNORED, _FURTHER_TOKENS, r"^model\.visual\.")
)
_QWEN_PREDICTOR = MtpNames(
    WeightNames(_QWEN_LAYER, experts=EXPERTS, prefixes=("",), layers="mtp.layers", final_norm="mtp.norm"),
    projection="mtp.fc",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
)


def qwen_predictor(num_layers: int) -> MtpNames:  # noqa: ARG001
    return _QWEN_PREDICTOR


def glm_predictor(num_layers: int) -> MtpNames:
    """Return the names of a layer that follows the others."""
    module = f"model.layers.{num_layers}"
    names = replace(
        GLM4_MOE,
        prefixes=("",),
        layers="model.layers",
        first_layer=num_layers,
        final_norm=f"{module}.shared_head.norm",
    )
    return MtpNames(names, f"{module}.eh_proj", f"{module}.enorm", f"{module}.hnorm")


QWEN3_5_VISION = replace(QWEN3_5, prefixes=("model.language_model.",))
