"""The pooling of a checkpoint, read from its sentence-transformers files and config.json: modules, labels, prompts.

    modules.json                        the modules, in order
    1_Pooling/config.json etc.          the configuration of each module
    sentence_bert_config.json           the maximum length of a text
    config_sentence_transformers.json   prompts

An unknown module is an error: leaving it out would change every embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from inflight.checkpoint.fields import Fields
from inflight.checkpoint.files import inside, read_list, read_object
from inflight.errors import ModelError, shown
from inflight.models.heads import POOLINGS, DenseLayer, HeadLayer, NormLayer
from inflight.scoring import PoolingFacts, Scale

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
# Early versions wrote one file name per kind of transformer; now it is always the first.
LENGTHS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
TOKENIZER = "tokenizer_config.json"
MAX_LENGTH = 1 << 24  # tokenizers write larger numbers to mean that there is no limit
MAX_MODULES = 16
MAX_PROMPTS, MAX_PROMPT_LENGTH = 1024, 1 << 16

# The flags of older files, in the order in which their vectors are concatenated.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# By the last part of the class name.
_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """The contents of the sentence-transformers files: pooling, head layers, limits and prompts."""

    # Some of POOLINGS, concatenated in this order; empty if the transformer itself returns scores.
    pooling: tuple[str, ...] = ()
    width: int = 0  # features of the hidden states that are pooled
    head: tuple[HeadLayer, ...] = ()
    normalize: bool = False
    max_length: int | None = None  # tokens of a text; None: not declared
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"  # of two embeddings
    activation: str | None = None  # of a cross-encoder's logits, as a torch class


def read_sentence_files(folder: Path) -> SentenceFiles | None:
    """Return the contents, or None without a modules.json: the folder is not from sentence-transformers."""
    listed = read_list(folder, MODULES)
    if listed is None:
        return None
    modules = [_module(folder, item) for item in listed[: MAX_MODULES + 1]]
    if not 1 <= len(modules) <= MAX_MODULES or modules[0][0] != "Transformer":
        raise ModelError(
            f"{folder / MODULES} lists {', '.join(name for name, _ in modules) or 'nothing'}: it must begin with a "
            f"Transformer and have at most {MAX_MODULES} modules"
        )
    if modules[0][1]:
        raise ModelError(
            f"{folder / MODULES} has its Transformer in {modules[0][1]!r}: serve that folder instead"
        )
    values: dict[str, Any] = {}
    head: list[HeadLayer] = []
    for index, (module_type, path) in enumerate(modules[1:], 1):
        if "normalize" in values and module_type != "Dropout":
            raise ModelError(
                f"{folder / MODULES} has {module_type} after Normalize: only a last Normalize is supported"
            )
        if (module_type == "Pooling") != (index == 1):
            raise ModelError(
                f"{folder / MODULES} has {module_type} as module {index}: Pooling must be module 1, and only that"
            )
        if module_type == "Pooling":
            values["pooling"], values["width"] = _pooling(_config(folder, path))
        elif module_type == "Dense":
            head.append(_dense(_config(folder, path), path))
        elif module_type == "LayerNorm":
            head.append(NormLayer(f"{path}/norm", _config(folder, path).integer("dimension"), eps=1e-5))
        elif module_type == "Normalize":
            values["normalize"] = True
    return SentenceFiles(head=tuple(head), **values, **_lengths(folder), **_prompts(folder))


_KNOWN = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout")


def _module(folder: Path, item: Any) -> tuple[str, str]:
    """Return (kind, sub-folder) of an entry of modules.json."""
    if not isinstance(item, Mapping):
        raise ModelError(f"{folder / MODULES} has the entry {shown(item)}: it must be an object")
    fields = Fields(item, f"an entry of {MODULES}")
    name, path = fields.string("type"), fields.string("path", "")
    module_type = name.rpartition(".")[2]
    if not name.startswith("sentence_transformers.") or module_type not in _KNOWN:
        raise ModelError(
            f"{folder / MODULES} has the module {shown(name)}: supported modules are {', '.join(_KNOWN)}"
        )
    has_files = module_type in ("Pooling", "Dense", "LayerNorm")
    if (has_files and not path) or path in (".", "..") or "/" in path or "\\" in path or "\0" in path:
        raise fields.error("path", "the name of a folder next to it")
    inside(folder, path)
    return module_type, path


def _config(folder: Path, path: str) -> Fields:
    name = f"{path}/config.json"
    values = read_object(folder, name)
    if values is None:
        raise ModelError(f"{folder / name} is named in {MODULES} but is missing")
    return Fields(values, name)


def _pooling(config: Fields) -> tuple[tuple[str, ...], int]:
    """Return (modes, features of a token)."""
    mode = config.values.get("pooling_mode")
    if mode is not None:
        modes = [mode] if isinstance(mode, str) else config.strings("pooling_mode")
        if not modes or len(modes) > len(POOLINGS) or not set(modes) <= set(POOLINGS):
            raise config.error("pooling_mode", f"some of {', '.join(POOLINGS)}")
    else:
        modes = [mode for flag, mode in _FLAGS.items() if config.boolean(flag, False)]
        if not modes:
            raise ModelError(f"{config.where} has no pooling mode: it must be some of {', '.join(POOLINGS)}")
    if not config.boolean("include_prompt", True):
        raise config.error("include_prompt", "true: pooling without the prompt is not supported")
    size = "embedding_dimension" if "embedding_dimension" in config else "word_embedding_dimension"
    return tuple(modes), config.integer(size)


def _dense(config: Fields, path: str) -> DenseLayer:
    for name in ("module_input_name", "module_output_name"):
        if config.string(name, "sentence_embedding") != "sentence_embedding":
            raise config.error(name, "'sentence_embedding'")
    if config.boolean("use_residual", False):
        raise config.error("use_residual", "false")
    return DenseLayer(
        f"{path}/linear",
        config.integer("in_features"),
        config.integer("out_features"),
        config.boolean("bias", True),
        _ACTIVATIONS[torch_class(config, "activation_function", tuple(_ACTIVATIONS))],
    )


def torch_class(config: Fields, name: str, allowed: tuple[str, ...]) -> str:
    """Return the last part of a torch.nn class name. The class is never imported by that name."""
    path = config.string(name)
    class_name = path.rpartition(".")[2]
    if not path.startswith("torch.nn.") or class_name not in allowed:
        raise config.error(name, f"torch.nn's {', '.join(allowed)}")
    return class_name


def declared_length(folder: Path | None) -> int | None:
    """Return the maximum length in tokenizer_config.json, or None if there is none or it is meaningless."""
    config = {} if folder is None else read_object(folder, TOKENIZER) or {}
    length = config.get("model_max_length")
    return length if isinstance(length, int) and 0 < length <= MAX_LENGTH else None


def _lengths(folder: Path) -> dict[str, Any]:
    for name in LENGTHS:
        values = read_object(folder, name)
        if values is not None:
            fields = Fields(values, name)
            length = fields.integer("max_seq_length") if "max_seq_length" in fields else None
            return {"max_length": length, "lowercase": fields.boolean("do_lower_case", False)}
    return {}


def _prompts(folder: Path) -> dict[str, Any]:
    fields = Fields(read_object(folder, PROMPTS) or {}, PROMPTS)
    prompts = fields.part("prompts").values if "prompts" in fields else {}
    short = all(isinstance(text, str) and len(text) <= MAX_PROMPT_LENGTH for text in prompts.values())
    if not short or len(prompts) > MAX_PROMPTS:
        raise fields.error(
            "prompts", f"at most {MAX_PROMPTS} texts of at most {MAX_PROMPT_LENGTH} characters"
        )
    default = fields.string("default_prompt_name") if "default_prompt_name" in fields else None
    if default is not None and default not in prompts:
        raise fields.error("default_prompt_name", f"one of {', '.join(prompts) or 'no prompts'}")
    return {
        "prompts": dict(prompts),
        "default_prompt": default,
        "similarity": fields.string("similarity_fn_name", "cosine"),
        "activation": fields.string("activation_fn") if "activation_fn" in fields else None,
    }


MAX_LABELS = 1 << 16


def embedding_facts(
    files: SentenceFiles, config: Mapping[str, Any], size: int, splittable: bool
) -> PoolingFacts:
    """Return the facts of an embedder. It can score pairs if the checkpoint compares embeddings by cosine."""
    by_angle = files.similarity == "cosine" or (files.similarity == "dot" and files.normalize)
    return PoolingFacts(
        task="embed",
        size=size,
        splittable=splittable,
        normalize=files.normalize,
        dimensions=_dimensions(Fields(config), size),
        prompts=files.prompts,
        default_prompt=files.default_prompt,
        lowercase=files.lowercase,
        scale="cosine",
        scores="cosine" if by_angle else None,
    )


def classifier_facts(
    config: Mapping[str, Any],
    files: SentenceFiles | None,
    splittable: bool,
    scores: Literal["pair", "template"] | None = "pair",
) -> PoolingFacts:
    """Return the facts of a classifier. `scores` is how a pair becomes one score if there is a single label."""
    labels = read_labels(config)
    return PoolingFacts(
        task="classify",
        size=len(labels),
        splittable=splittable,
        prompts={} if files is None else files.prompts,
        default_prompt=None if files is None else files.default_prompt,
        lowercase=files is not None and files.lowercase,
        labels=labels,
        scale=_scale(Fields(config), files, len(labels)),
        scores=scores if len(labels) == 1 else None,
    )


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a classifier's labels in order. Without any in the config there are two, as in transformers."""
    fields = Fields(config)
    if "id2label" not in fields:
        count = fields.integer("num_labels", 2)
        if count > MAX_LABELS:
            raise fields.error("num_labels", f"at most {MAX_LABELS}")
        return tuple(f"LABEL_{index}" for index in range(count))
    names = fields.part("id2label").values
    labels = tuple(names.get(str(index)) for index in range(len(names)))
    if not 1 <= len(labels) <= MAX_LABELS or not all(isinstance(label, str) for label in labels):
        raise ModelError(
            f"id2label in config.json is {shown(names)}: it must name 1 to {MAX_LABELS} labels, numbered from 0"
        )
    return labels  # type: ignore[return-value]  # all are strings


def _scale(config: Fields, files: SentenceFiles | None, num_labels: int) -> Scale:
    """Return the checkpoint's own scale of its logits, or the default of sentence-transformers and transformers."""
    stated: tuple[Fields, str] | None = None
    if files is not None and files.activation is not None:
        stated = Fields({"activation_fn": files.activation}, PROMPTS), "activation_fn"
    elif "sentence_transformers" in config and "activation_fn" in config.part("sentence_transformers"):
        stated = config.part("sentence_transformers"), "activation_fn"
    elif "sbert_ce_default_activation_function" in config:
        stated = config, "sbert_ce_default_activation_function"
    if stated is not None:
        class_name = torch_class(*stated, ("Identity", "Sigmoid", "Softmax"))
        scales: dict[str, Scale] = {"Identity": "logit", "Sigmoid": "sigmoid", "Softmax": "softmax"}
        return scales[class_name]
    several = config.values.get("problem_type") == "multi_label_classification"
    return "sigmoid" if num_labels == 1 or several else "softmax"


def _dimensions(config: Fields, size: int) -> tuple[int, ...] | None:
    """Return the sizes to which an embedding may be truncated, if the config lists them."""
    sizes = config.values.get("matryoshka_dimensions")
    if sizes is None:
        return None
    valid = isinstance(sizes, list) and all(type(item) is int and 0 < item <= size for item in sizes)
    if not valid or not sizes:
        raise config.error("matryoshka_dimensions", f"a list of sizes up to {size}")
    return tuple(sorted(set(sizes)))
