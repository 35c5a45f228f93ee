"""The CPU backends against the reference, and the compiled one against itself under other schedules."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inflight.errors import ConfigError
from inflight.kv.layout import LayerKV
from inflight.layers.attention.backend import AttentionInputs, AttentionLayer, KVShape, LayerCache
from inflight.layers.attention.cpu import (
    ComposedAttention,
    HeadAttention,
    NativeAttention,
    TorchCpuAttention,
    cpu_backend,
)
from inflight.layers.native.library import native_library
from inflight.layers.native_kernels import NativeKernels
from inflight.layers.torch_kernels import TorchKernels
from tests.layers.attention.paged import Heads, Scene, Step
from tests.support.reference_attention import ReferenceAttention


def compiled() -> NativeAttention:
    library = native_library()
    if library is None:
        pytest.skip("nothing can be compiled here")
    return NativeAttention(library)


class Unprepared:
    """The compiled attention without norms and rotation of heads."""

    def __init__(self, backend: NativeAttention) -> None:
        self.allocate = backend.allocate
        self._backend = backend

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        bare = replace(layer, q_norm=None, k_norm=None, v_norm=None, cos_sin=None, has_kv=key is not None)
        qkv = torch.cat([heads.flatten(1) for heads in (query, key, value) if heads is not None], dim=1)
        return self._backend.attend(qkv, bare, cache, inputs).view(query.shape)


def native() -> Unprepared:
    return Unprepared(compiled())


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
    others = [LayerKV(2, 40, 40), LayerKV(2, 40, 40), LayerKV(2, 16, 16)]
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


@pytest.mark.parametrize("quantized", [None, "int8"])
def test_bits_do_not_depend_on_the_threads(quantized: str | None) -> None:
    scene = Scene(Heads(4, 2, 64), 16, lengths=[50, 9])
    library = native_library()
    assert library is not None
    threads = library.threads
    actual = []
    try:
        for count in (1, 2, 3):
            library.threads = count
            actual.append(torch.cat(scene.run(native(), scene.whole(), quantized=quantized)))
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


# ---- int8 ----


def rounded(scene: Scene) -> Scene:
    """Return the scene with the keys and values that an int8 cache stands for, one head at a time."""
    copy = deepcopy(scene)
    for packed in copy.qkv:
        _, keys, values = scene.heads.split(packed)
        for x in (head for half in (keys, values) for token in half for head in token):
            least = x.abs().max() / 127
            scale = least.bfloat16()
            while scale < least:
                scale = torch.nextafter(scale, torch.tensor(torch.inf, dtype=torch.bfloat16))
            codes = (x / scale.float()).round()
            assert codes.abs().max() in (126, 127)
            x.copy_(codes.double() * scale.double())
    return copy


@pytest.mark.parametrize(
    ("heads", "block_size", "window", "sinks", "softcap"),
    [
        (Heads(4, 2, 64), 16, None, False, None),
        (Heads(2, 2, 128), 32, 20, False, None),
        (Heads(6, 2, 80), 16, 7, True, None),
        (Heads(16, 2, 16), 16, None, True, 2.0),
        (Heads(6, 2, 20), 8, 30, False, 0.7),  # tiles are gathered: neither blocks nor heads are whole ones
        (Heads(3, 1, 256), 1, None, False, None),
    ],
)
def test_int8_cache_matches_float64_on_what_codes_stand_for(
    backend: HeadAttention,
    heads: Heads,
    block_size: int,
    window: int | None,
    sinks: bool,
    softcap: float | None,
) -> None:
    scene = Scene(heads, block_size, lengths=[3, 49, 17])
    scene.sinks, scene.softcap = torch.randn(heads.num_heads) if sinks else None, softcap
    expected = torch.cat(rounded(scene).run(ReferenceAttention(), scene.whole(), window))
    for steps in (scene.whole(), scene.chunks(9), scene.chunks(1)):
        actual = torch.cat(scene.run(backend, steps, window, quantized="int8"))
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 32), (20, 8)])
@pytest.mark.parametrize("group", [1, 5])
def test_bits_with_an_int8_cache_do_not_depend_on_the_schedule(
    window: int | None, head_dim: int, block_size: int, group: int
) -> None:
    scene = Scene(Heads(2 * group, 2, head_dim), block_size, lengths=[70, 1, 39, 18])
    whole = scene.run(native(), scene.whole(), window, quantized="int8")
    for steps in (scene.alone(), scene.chunks(1), scene.chunks(7), scene.chunks(32)):
        for actual, reference in zip(
            scene.run(native(), steps, window, quantized="int8"), whole, strict=True
        ):
            assert torch.equal(actual, reference)


def test_quantized_and_plain_layers_share_blocks(backend: HeadAttention) -> None:
    scene = Scene(Heads(), block_size=4, lengths=[9, 21])
    others = [LayerKV(2, 40, 40), LayerKV(2, 16, 16, quantized="int8")]
    expected = torch.cat(rounded(scene).run(ReferenceAttention(), scene.whole()))
    actual = torch.cat(scene.run(backend, scene.chunks(6), others=others, quantized="int8"))
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def test_int8_entry_reads_a_block_that_another_fills_in_the_same_step(backend: HeadAttention) -> None:
    scene = Scene(Heads(), block_size=16, lengths=[16, 20])
    scene.qkv[1][:16] = scene.qkv[0]  # the same prefix
    expected = rounded(scene).run(ReferenceAttention(), scene.whole())[1][16:]
    scene.tables[scene.rows[1]][0] = scene.tables[scene.rows[0]][0]
    actual = scene.run(backend, [[(1, 16, 4), (0, 0, 16)]], quantized="int8")[1][16:]
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e30])
def test_int8_keys_and_values_may_have_any_size(backend: HeadAttention, size: float) -> None:
    scene = Scene(Heads(), block_size=16, lengths=[5])
    scene.qkv[0][:, 64:] *= size  # keys and values
    scene.qkv[0][:, :64] = 0.0
    _, _, value = scene.heads.split(scene.qkv[0])
    (actual,) = scene.run(backend, scene.whole(), quantized="int8")
    expected = value[:1].repeat_interleave(2, dim=1)  # the first token sees only itself
    torch.testing.assert_close(actual[:1], expected, rtol=0, atol=size * 3 / 127 + 1e-40)
    assert actual.isfinite().all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [64, 115])  # of a key of the first KV head, and of a value of the second
def test_numbers_that_are_not_finite_show_in_results(
    backend: HeadAttention, number: float, column: int
) -> None:
    scene = Scene(Heads(), block_size=16, lengths=[40])
    scene.qkv[0][20, column] = number
    (actual,) = scene.run(backend, scene.chunks(1), quantized="int8")
    group = slice(0, 2) if column == 64 else slice(2, 4)  # the query heads of that KV head
    assert actual[:20].isfinite().all()
    assert actual[20:, group].isnan().all()


def test_large_scores_do_not_overflow(backend: HeadAttention) -> None:
    scene = Scene(Heads(), block_size=16, lengths=[40])
    scene.qkv[0][:, : 6 * 16] *= 30  # queries and keys: scores in the thousands
    assert_close(scene, backend, [scene.chunks(11)])


@pytest.mark.parametrize("quantized", [None, "int8"])
@pytest.mark.parametrize(
    ("norms", "rotary_dim"), [("qk", 32), ("qkv", 16), ("", 24), ("qk", None), ("v", None)]
)
def test_one_call_is_bit_identical_to_single_operations(
    quantized: str | None, norms: str, rotary_dim: int | None
) -> None:
    """Norms and rotation are part of the call; a layer may also have gates behind its heads, or queries alone."""
    scene = Scene(Heads(6, 2, 32), block_size=16, lengths=[50, 1, 20, 90])
    library = native_library()
    assert library is not None
    kernels = NativeKernels(library)
    q_norm, k_norm, v_norm = (torch.randn(32) if name in norms else None for name in "qkv")
    cos_sin = None if rotary_dim is None else torch.randn(100, rotary_dim)
    layer = replace(scene.layer(), q_norm=q_norm, k_norm=k_norm, v_norm=v_norm, cos_sin=cos_sin)
    shape = KVShape.from_layers([LayerKV(2, 32, 32, quantized=quantized)], 16, torch.float32)
    composed, fused = ComposedAttention(kernels, native()), compiled()
    attends = composed.attend, fused.attend
    caches = [fused.allocate(shape, scene.num_blocks, torch.device("cpu")) for _ in attends]
    for cache in caches:
        cache.slots[0].zero_()
    for step in scene.chunks(13):
        inputs = scene.inputs(step)
        qkv = torch.cat([scene.qkv[r][first : first + n] for r, first, n in step])
        queries, gates = torch.randn(len(qkv), 6 * 32), torch.randn(len(qkv), 7)
        without = replace(layer, has_kv=False, k_norm=None, v_norm=None)
        outs = []
        for attend, cache in zip(attends, caches, strict=True):
            gated = torch.cat((qkv, gates), dim=1)[:, : qkv.shape[1]]
            outs.append(attend(gated, layer, cache.layers[0], inputs))
            outs.append(attend(queries.clone(), without, cache.layers[0], inputs))
        assert torch.equal(outs[0], outs[2])
        assert torch.equal(outs[1], outs[3])
    assert torch.equal(caches[0].slots[0], caches[1].slots[0])


def test_wrong_preparation_is_rejected() -> None:
    scene = Scene(Heads(), block_size=16, lengths=[4])
    shape = KVShape.from_layers([LayerKV(2, 16, 16)], 16, torch.float32)
    (cache,) = compiled().allocate(shape, 4, torch.device("cpu")).layers
    layer, inputs, qkv = scene.layer(), scene.inputs(scene.whole()[0]), torch.zeros(4, 8 * 16)
    attend = compiled().attend
    with pytest.raises(ConfigError, match=r"qkv is \[4, 112\]: it must be \[4, 128\]"):
        attend(qkv[:, :112], layer, cache, inputs)
    with pytest.raises(ConfigError, match="4 KV heads and a cache of 2 do not match"):
        attend(torch.zeros(4, 12 * 16), replace(layer, num_kv_heads=4), cache, inputs)
    with pytest.raises(ConfigError, match="a norm has the shape"):
        attend(qkv, replace(layer, q_norm=torch.ones(8), k_norm=torch.ones(16)), cache, inputs)
    with pytest.raises(ConfigError, match="cannot rotate"):
        attend(qkv, replace(layer, cos_sin=torch.zeros(9, 18)), cache, inputs)


def test_wrong_shapes_are_rejected() -> None:
    scene = Scene(Heads(), block_size=16, lengths=[4])
    shape = KVShape.from_layers([LayerKV(2, 16, 16)], 16, torch.float32)
    (cache,) = compiled().allocate(shape, 4, torch.device("cpu")).layers
    layer = scene.layer()
    qkv, attend = torch.zeros(4, 8 * 16), compiled().attend
    inputs = scene.inputs(scene.whole()[0])
    with pytest.raises(ConfigError, match="do not match"):
        attend(torch.zeros(4, 7 * 16), replace(layer, num_heads=3), cache, inputs)
    with pytest.raises(ConfigError, match="int32"):
        attend(qkv, layer, cache, replace(inputs, rows=inputs.rows.long()))
    with pytest.raises(ConfigError, match="the vector of sinks has the shape"):
        attend(qkv, replace(layer, sinks=torch.zeros(3)), cache, inputs)
    shape = KVShape.from_layers([LayerKV(2, 16, 16, quantized="int8")], 16, torch.float32)
    (quantized,) = compiled().allocate(shape, 4, torch.device("cpu")).layers
    with pytest.raises(ConfigError, match=r"scales torch.int32 \[4, 2, 8\] do not match"):
        attend(qkv, layer, replace(quantized, scales=quantized.scales[:, :, :8]), inputs)
    narrow = replace(inputs, slot_mapping=inputs.slot_mapping[:, :2])
    with pytest.raises(ConfigError, match="slot_mapping"):
        attend(qkv, layer, cache, narrow)


def test_cpu_cache_must_be_float32() -> None:
    shape = KVShape.from_layers([LayerKV(2, 16, 16)], 16, torch.bfloat16)
    with pytest.raises(ConfigError, match="float32"):
        compiled().allocate(shape, 4, torch.device("cpu"))
    shape = KVShape.from_layers([LayerKV(2, 16, 16, quantized="fp8")], 16, torch.float32)
    with pytest.raises(ConfigError, match="the KV cache is fp8 on a CPU: it must be float32 or int8"):
        compiled().allocate(shape, 4, torch.device("cpu"))


def test_compiled_backend_is_preferred() -> None:
    expected = ComposedAttention if native_library() is None else NativeAttention
    assert isinstance(cpu_backend(TorchKernels()), expected)
