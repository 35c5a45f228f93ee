"""From a configuration to an engine that is ready to step."""

from __future__ import annotations

from inflight.config import EngineConfig
from inflight.engine import EngineCore, ModelFacts
from inflight.execution.platforms import platform
from inflight.frontend.chat import check_parsers
from inflight.loading.cores import policy_of
from inflight.loading.decoders import load_decoder_engine
from inflight.loading.encoders import load_encoder_engine
from inflight.loading.loaded_engine import LoadedEngine, LoadProgress
from inflight.loading.opened import load_tokenizer, open_configured
from inflight.models.checkpoint import fingerprint
from inflight.models.encoder_families import encoder_architecture


def load_engine(config: EngineConfig, progress: LoadProgress | None = None) -> LoadedEngine:
    """Open the checkpoint, load the weights, size the KV memory and put the engine together."""
    model = config.model
    policy = policy_of(config.scheduler)  # first of all: a wrong name should not take minutes to show
    check_parsers(model)
    place = platform(model.device)
    checkpoint = open_configured(config, model.load_format)
    tokenizer = load_tokenizer(config, checkpoint)
    load = load_decoder_engine if encoder_architecture(checkpoint.config) is None else load_encoder_engine
    known_as = fingerprint(
        checkpoint, tokenizer.folder if tokenizer is not None and model.tokenizer else None
    )
    loaded = load(config, policy, place, checkpoint, tokenizer, progress)
    loaded.fingerprint = known_as
    return loaded


def load_core(config: EngineConfig, progress: LoadProgress) -> tuple[EngineCore, ModelFacts]:
    """The half of an engine that runs in a process of its own: see `engine/remote/worker.py`."""
    loaded = load_engine(config, progress)
    compiler = loaded.input_processor.grammars.compiler
    if compiler is not None:
        compiler.warm_up()
    return loaded.core, loaded.facts
