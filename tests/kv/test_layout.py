"""Layers get places that are theirs alone, in few tables and little unused memory."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from inflight.kv.layout import LayerKV, place_layers
from inflight.layers.attention.backend import KVShape

FULL, SLIDING = LayerKV(8, 256, 256), LayerKV(8, 256, 256, window=1024)
LATENT = LayerKV(1, 576, 0)  # values are made from the keys


@pytest.mark.parametrize(
    ("layers", "num_slots", "windows"),
    [
        ([FULL] * 32, 32, (None,)),  # a model without windows has one table, and a slot for each layer
        ([SLIDING] * 32, 32, (1024,)),
        (([SLIDING] * 5 + [FULL]) * 8, 8, (None, *[1024] * 5)),  # as Gemma 3 12B
        ([SLIDING, FULL] * 12, 12, (None, 1024)),  # as gpt-oss 20b
        (
            ([SLIDING] * 5 + [FULL]) * 4 + [SLIDING] * 2,
            4,
            (None, *[1024] * 6),
        ),  # as Gemma 3 1B: little is unused
        # Global layers of half the size share slots, two of them each.
        (([SLIDING] * 5 + [LayerKV(2, 512, 512)]) * 8, 4, (None, *[1024] * 10)),
        ([LayerKV(8, 256, 256, window=512), SLIDING, FULL] * 4, 4, (None, 512, 1024)),
        ([], 1, (None,)),
    ],
)
def test_models_get_few_tables(
    layers: list[LayerKV], num_slots: int, windows: tuple[int | None, ...]
) -> None:
    places, of_tables = place_layers(layers)
    assert of_tables == windows
    assert max((place.slot for place in places), default=0) == num_slots - 1


@given(
    st.lists(
        st.sampled_from([FULL, SLIDING, LayerKV(2, 512, 512), LayerKV(1, 64, 64, 128), LATENT]), max_size=40
    )
)
def test_places_are_disjoint_and_follow_the_depth(layers: list[LayerKV]) -> None:
    places, windows = place_layers(layers)
    assert len(set(places)) == len(layers)
    largest = max((layer.size for layer in layers), default=0)
    for layer, place in zip(layers, places, strict=True):
        assert windows[place.table] == layer.window
        assert (place.part + 1) * layer.size <= largest
    for kind in set(layers):
        slots = [place.slot for layer, place in zip(layers, places, strict=True) if layer == kind]
        assert slots == sorted(slots), "a stage's layers are in neighbouring slots"


def test_quantized_layers_take_half_the_bytes_and_their_scales() -> None:
    plain, quantized = LayerKV(8, 128, 128), LayerKV(8, 128, 128, quantized="fp8")
    assert KVShape.from_layers([plain] * 4, 16, torch.bfloat16).bytes_per_block == 4 * 16 * 8 * 2 * 256
    shape = KVShape.from_layers([quantized] * 4, 16, torch.bfloat16)
    assert (shape.windows, len(shape.slots)) == ((None,), 4)
    assert shape.bytes_per_block == 4 * 16 * 8 * 2 * (128 + 2)


def test_latents_that_are_keys_and_values_are_kept_once() -> None:
    shape = KVShape.from_layers([LATENT] * 27, 16, torch.bfloat16)
    assert shape.bytes_per_block == 27 * 16 * 2 * 576


def test_two_quantized_layers_fit_in_place_of_a_plain_one() -> None:
    layers = [LayerKV(8, 128, 128, quantized=None if index in (0, 5) else "fp8") for index in range(32)]
    shape = KVShape.from_layers(layers, 16, torch.bfloat16)
    assert len(shape.slots) * len(shape.windows) == 18  # 2 plain layers, 15 pairs, and one that is unused
    assert shape.bytes_per_part == 2 * 16 * 8 * 2 * (128 + 2)
