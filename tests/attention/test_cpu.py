"""The CPU backends against the reference, and the compiled one against itself under other schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.attention.backend import KVShape
from inflight.attention.cpu import CpuAttention, HeadAttention, TorchCpuAttention, cpu_attention
from inflight.errors import ConfigError
from inflight.kv.layout import LayerKV
from inflight.native.library import native_library
from tests.attention.paged import Heads, Scene, Step
from tests.support.reference_attention import ReferenceAttention


def native() -> CpuAttention:
    library = native_library()
    if library is None:
        pytest.skip("nothing can be compiled here")
    return CpuAttention(library)


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> HeadAttention:
    return native() if request.param == "native" else TorchCpuAttention()


def assert_close(
    scene: Scene, backend: HeadAttention, schedules: list[list[Step]], window: int | None = None
) -> None:
    expected = torch.cat(scene.run(ReferenceAttention(), scene.whole(), window))
    for steps in schedules:
        actual = torch.cat(scene.run(backend, steps, window))
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("head_dim", [16, 20, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_any_head_shape_matches_the_reference(backend: HeadAttention, head_dim: int, group: int) -> None:
    scene = Scene(Heads(2 * group, 2, head_dim), block_size=16, lengths=[1, 18])
    assert_close(scene, backend, [scene.whole(), scene.chunks(6)])


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 40])
def test_any_block_size_and_window_matches_the_reference(
    backend: HeadAttention, block_size: int, window: int | None
) -> None:
    scene = Scene(Heads(), block_size, lengths=[3, 49, 17])
    assert_close(scene, backend, [scene.whole(), scene.chunks(9)], window)


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(
    ("sinks", "softcap"), [(True, None), (False, 0.7), (False, 50.0), (True, 2.0)], ids=str
)
def test_sinks_and_soft_caps_match_the_reference(
    backend: HeadAttention, window: int | None, sinks: bool, softcap: float | None
) -> None:
    scene = Scene(Heads(6, 2, 16), block_size=16, lengths=[1, 49, 18])
    scene.sinks = torch.tensor([-3.0, 0.0, 2.0, 8.0, -20.0, 1.0]) if sinks else None
    scene.softcap = softcap
    assert_close(scene, backend, [scene.whole(), scene.chunks(7), scene.chunks(1)], window)


@pytest.mark.parametrize("window", [None, 11])
def test_bits_with_sinks_and_soft_caps_do_not_depend_on_the_schedule(window: int | None) -> None:
    scene = Scene(Heads(4, 2, 64), block_size=16, lengths=[70, 1, 39])
    scene.sinks, scene.softcap = torch.randn(4), 3.0
    whole = scene.run(native(), scene.whole(), window)
    for steps in (scene.alone(), scene.chunks(1), scene.chunks(7)):
        for actual, reference in zip(scene.run(native(), steps, window), whole, strict=True):
            assert torch.equal(actual, reference)


def test_blocks_of_a_layer_may_be_apart(backend: HeadAttention) -> None:
    """Layers with smaller heads than others take only part of each block."""
    scene = Scene(Heads(), block_size=4, lengths=[9, 21])
    others = [LayerKV(2, 40), LayerKV(2, 40), LayerKV(2, 16)]
    expected = torch.cat(scene.run(ReferenceAttention(), scene.whole()))
    actual = torch.cat(scene.run(backend, scene.chunks(6), others=others))
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ragged_batches_match_the_reference(data: st.DataObject) -> None:
    """Entries in any order, some of one token and some of many."""
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    scene = Scene(Heads(4, 2, 16), data.draw(st.sampled_from([4, 16])), lengths, seed=len(lengths))
    done = [0] * len(lengths)
    steps: list[Step] = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        open_requests = [r for r, n in enumerate(lengths) if done[r] < n]
        chosen = data.draw(st.lists(st.sampled_from(open_requests), min_size=1, unique=True))
        step = [(r, done[r], data.draw(st.integers(1, lengths[r] - done[r]))) for r in chosen]
        for r, _, count in step:
            done[r] += count
        steps.append(step)
    window = data.draw(st.sampled_from([None, 6, 20]))
    for backend in (native(), TorchCpuAttention()):
        assert_close(scene, backend, [steps], window)


@pytest.mark.parametrize("window", [None, 1, 11, 30])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 32), (80, 16), (20, 8)])
@pytest.mark.parametrize("group", [1, 2, 5])
def test_bits_do_not_depend_on_the_schedule(
    window: int | None, head_dim: int, block_size: int, group: int
) -> None:
    scene = Scene(Heads(2 * group, 2, head_dim), block_size, lengths=[70, 1, 39, 18])
    whole = scene.run(native(), scene.whole(), window)
    for steps in (scene.alone(), scene.chunks(1), scene.chunks(7), scene.chunks(32)):
        for actual, reference in zip(scene.run(native(), steps, window), whole, strict=True):
            assert torch.equal(actual, reference)


def test_bits_do_not_depend_on_the_threads() -> None:
    scene = Scene(Heads(4, 2, 64), 16, lengths=[50, 9])
    library = native_library()
    assert library is not None
    threads = library.threads
    actual = []
    try:
        for count in (1, 2, 3):
            library.threads = count
            actual.append(torch.cat(scene.run(native(), scene.whole())))
    finally:
        library.threads = threads
    assert torch.equal(actual[0], actual[1])
    assert torch.equal(actual[0], actual[2])


def test_entry_reads_a_block_that_another_fills_in_the_same_step(backend: HeadAttention) -> None:
    scene = Scene(Heads(), block_size=16, lengths=[16, 20])
    scene.qkv[1][:16] = scene.qkv[0]  # the same prefix
    expected = scene.run(ReferenceAttention(), scene.whole())[1][16:]
    scene.tables[scene.rows[1]][0] = scene.tables[scene.rows[0]][0]
    # The reader comes first in the batch, the writer second.
    actual = scene.run(backend, [[(1, 16, 4), (0, 0, 16)]])[1][16:]
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def test_large_scores_do_not_overflow(backend: HeadAttention) -> None:
    scene = Scene(Heads(), block_size=16, lengths=[40])
    scene.qkv[0][:, : 6 * 16] *= 30  # queries and keys: scores in the thousands
    assert_close(scene, backend, [scene.chunks(11)])


def test_wrong_shapes_are_rejected() -> None:
    scene = Scene(Heads(), block_size=16, lengths=[4])
    shape = KVShape.of([LayerKV(2, 16)], 16, torch.float32)
    (cache,) = native().allocate(shape, 4, torch.device("cpu")).layers
    layer = scene.layer()
    query, key = torch.zeros(4, 4, 16), torch.zeros(4, 2, 16)
    inputs = scene.inputs(scene.whole()[0])
    with pytest.raises(ConfigError, match="do not match"):
        native().attend(query, torch.zeros(4, 1, 16), key, layer, cache, inputs)
    with pytest.raises(ConfigError, match="int32"):
        native().attend(query, key, key, layer, cache, replace(inputs, rows=inputs.rows.long()))
    with pytest.raises(ConfigError, match="sinks are"):
        native().attend(query, key, key, replace(layer, sinks=torch.zeros(3)), cache, inputs)
    narrow = replace(inputs, slot_mapping=inputs.slot_mapping[:, :2])
    with pytest.raises(ConfigError, match="slot_mapping"):
        native().attend(query, key, key, layer, cache, narrow)


def test_cpu_cache_must_be_float32() -> None:
    shape = KVShape.of([LayerKV(2, 16)], 16, torch.bfloat16)
    with pytest.raises(ConfigError, match="float32"):
        native().allocate(shape, 4, torch.device("cpu"))


def test_compiled_backend_is_preferred() -> None:
    expected = TorchCpuAttention if native_library() is None else CpuAttention
    assert isinstance(cpu_attention(), expected)
