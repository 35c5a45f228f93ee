"""Weights can be moved in place."""

from __future__ import annotations

import torch

from inflight.execution.platforms import relocate
from inflight.models.builtin import checkpoint_folder
from inflight.models.decoders.mixers import SelfAttention
from inflight.models.tensors import tensors_of
from tests.models.running import load, logprobs, prompt


def test_every_tensor_is_found_once_and_can_be_moved() -> None:
    decoder = load(checkpoint_folder())
    actual = list(tensors_of(decoder))
    assert len({id(tensor) for tensor in actual}) == len(actual)
    mixers = [layer.mixer for layer in decoder.layers if isinstance(layer.mixer, SelfAttention)]
    held = [decoder.final_norm, *(mixer.qkv._weight for mixer in mixers)]  # type: ignore[attr-defined]
    assert {id(tensor) for tensor in held} <= {id(tensor) for tensor in actual}
    before = logprobs(decoder, prompt())
    places = {id(tensor): tensor.data_ptr() for tensor in actual}
    relocate(decoder, torch.clone)
    assert all(tensor.data_ptr() != places[id(tensor)] for tensor in tensors_of(decoder))
    assert torch.equal(logprobs(decoder, prompt()), before)
