"""Models with a head alone: an encoder, and an engine over it."""

from __future__ import annotations

import logging
from functools import partial

from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.execution.platforms import Platform
from inflight.frontend import InputProcessor
from inflight.loading.cores import encoder_core
from inflight.loading.loaded_engine import LoadedEngine, LoadProgress
from inflight.models.checkpoint import Checkpoint
from inflight.models.defaults import resolve_dtype, resolve_text_length
from inflight.models.encoder_families import encoder_head, encoder_spec
from inflight.models.encoder_weights import load_encoder
from inflight.models.sentence_files import declared_length, read_sentence_files
from inflight.scheduling import Policy
from inflight.text import Tokenizer

logger = logging.getLogger(__name__)


def load_encoder_engine(
    config: EngineConfig,
    policy: Policy,
    place: Platform,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    progress: LoadProgress | None,
) -> LoadedEngine:
    model, folder = config.model, checkpoint.folder
    if config.parallel.num_ranks > 1:
        raise ConfigError(f"{config.parallel}: an encoder has one rank")
    spec = encoder_spec(checkpoint.config)
    files = None if folder is None else read_sentence_files(folder)
    head = encoder_head(checkpoint.config, files, spec.hidden_size)
    declared = (None if files is None else files.max_length, declared_length(folder))
    max_model_len = resolve_text_length(spec.max_position, declared, model.max_model_len)
    dtype = resolve_dtype(model.dtype, checkpoint.config)
    kernels = place.encoder_kernels(spec, dtype)
    encoder = load_encoder(
        checkpoint,
        spec,
        head,
        kernels.layers,
        kernels.attention,
        kernels.head,
        dtype,
        place.device,
        max_position=max_model_len,
        load_format=model.load_format,
        seed=model.seed,
        progress=progress,
    )
    logger.info("%s; texts of up to %d tokens", place.describe(), max_model_len)
    build = partial(encoder_core, place, encoder, max_model_len)
    input_processor = InputProcessor.create(tokenizer, spec.vocab_size, max_model_len, (), model.seed)
    core = build(config, policy)
    return LoadedEngine(
        config,
        tokenizer,
        input_processor,
        {},
        place,
        core,
        encoder,
        build,
        generates=False,
        pooling=head.facts,
    )
