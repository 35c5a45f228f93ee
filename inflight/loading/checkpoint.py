"""Open the configured checkpoint and read everything but its weights: config, tokenizer, EOS tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from inflight.config import EngineConfig
from inflight.errors import ModelError
from inflight.models.builtin import checkpoint_folder
from inflight.models.checkpoint import Checkpoint, open_checkpoint
from inflight.models.decoders.pooling import Encode
from inflight.models.defaults import eos_token_ids
from inflight.text import Tokenizer


def open_model(config: EngineConfig) -> tuple[Checkpoint, str]:
    """Return the checkpoint without its weights, which need not exist, and its name."""
    return open_configured(config, "dummy"), model_name(config)


def open_configured(config: EngineConfig, load_format: str) -> Checkpoint:
    model = config.model
    return open_checkpoint(
        model_name(config), model.revision, load_format, model.hf_config, model.download_dir
    )


def model_name(config: EngineConfig) -> str:
    return str(checkpoint_folder()) if config.model.model is None else config.model.model


def load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    model = config.model
    if model.skip_tokenizer_init:
        return None
    if model.tokenizer is not None:
        other = open_checkpoint(model.tokenizer, load_format="dummy", download_dir=model.download_dir)
        folder: Path | None = other.folder
    else:
        folder = checkpoint.folder
    if folder is None:
        return None
    try:
        return Tokenizer.load(folder, model.chat_template)
    except ModelError:
        if model.load_format == "dummy" and model.tokenizer is None:
            return None  # random weights need only a config
        raise


def eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    eos = eos_token_ids(checkpoint.config, checkpoint.generation_config)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos = tuple(dict.fromkeys((*eos, tokenizer.eos_token_id)))
    return eos


def plain_ids(tokenizer: Tokenizer | None) -> Encode | None:
    return None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
