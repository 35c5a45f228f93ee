"""Writes a trained decoder as a checkpoint folder that transformers (and inflight) can load, and reads it again."""

import json
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.builtin.chat_format import CHAT_TEMPLATE, END_OF_TEXT, IM_END
from tools.builtin.model import Decoder, Shape
from tools.builtin.tokenizer import token_id


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(folder: Path) -> Decoder:
    """The decoder of a checkpoint that `export` wrote, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Decoder(Shape(**{field.name: config[field.name] for field in fields(Shape)}))
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()})
    return model


def export(model: Decoder, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """config.json, generation_config.json, tokenizer files and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    end_of_text, im_end = token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, IM_END)
    tensors = {
        f"model.{name}": value.detach().to("cpu", dtype).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write(
        folder / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **model.shape.as_dict(),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": im_end,
            "pad_token_id": end_of_text,
            "torch_dtype": str(dtype).removeprefix("torch."),
        },
    )
    _write(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.95,
            "max_new_tokens": 1024,
            "top_k": 50,
            "eos_token_id": [im_end, end_of_text],
            "pad_token_id": end_of_text,
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.shape.max_position_embeddings,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "bos_token": None,
            "unk_token": None,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
