"""Writes the trained models as checkpoint folders that transformers and sentence-transformers (and inflight) load."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from tools.rerankers.model import DIMENSIONS, BertShape, CrossEncoder, Embedder
from tools.rerankers.tokenizer import CLS, MASK, PAD, SEP, SPECIAL, UNK


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _common(
    model: nn.Module,
    shape: BertShape,
    tokenizer: Tokenizer,
    folder: Path,
    dtype: torch.dtype,
    config: dict[str, object],
) -> None:
    """config.json, the tokenizer's files and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to("cpu", dtype).contiguous() for name, value in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write(
        folder / "config.json",
        {
            **config,
            "model_type": "bert",
            **shape.as_dict(),
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "initializer_range": 0.05,
            "position_embedding_type": "absolute",
            "pad_token_id": SPECIAL.index(PAD),
            "torch_dtype": str(dtype).removeprefix("torch."),
        },
    )
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "model_max_length": shape.max_position_embeddings,
            "pad_token": PAD,
            "unk_token": UNK,
            "cls_token": CLS,
            "sep_token": SEP,
            "mask_token": MASK,
        },
    )


def export_cross_encoder(
    model: CrossEncoder, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """A `BertForSequenceClassification` of one label."""
    config: dict[str, object] = {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    _common(model, model.bert.shape, tokenizer, folder, dtype, config)


def export_embedder(
    model: Embedder, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """A `BertModel` with the files of sentence-transformers: mean pooling, then length one."""
    shape = model.bert.shape
    config: dict[str, object] = {
        "architectures": ["BertModel"],
        "matryoshka_dimensions": [size for size in DIMENSIONS if size <= shape.hidden_size],
    }
    _common(model.bert, shape, tokenizer, folder, dtype, config)
    module = "sentence_transformers.models."
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    _write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": module + kind}
            for index, (path, kind) in enumerate(modules)
        ],
    )
    modes = (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
    _write(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": shape.hidden_size,
            **{f"pooling_mode_{mode}": mode == "mean_tokens" for mode in modes},
            "include_prompt": True,
        },
    )
    _write(
        folder / "sentence_bert_config.json",
        {"max_seq_length": shape.max_position_embeddings, "do_lower_case": False},
    )
    _write(
        folder / "config_sentence_transformers.json",
        {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )


def _shape(folder: Path) -> BertShape:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return BertShape(**{key: config[key] for key in BertShape.__dataclass_fields__})


def load_cross_encoder(folder: Path) -> CrossEncoder:
    """What was exported, in float32."""
    model = CrossEncoder(_shape(folder))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def load_embedder(folder: Path) -> Embedder:
    """What was exported, in float32."""
    model = Embedder(_shape(folder))
    model.bert.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()
