"""Plans for a GPU expect what its runner allocates.

On torch's meta device, memory is only counted: the runner allocates its buffers and computes its largest step with the
sizes of real models, and no kernel is launched.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from benchmarks.shapes import SHAPES
from inflight.config import EngineConfig
from inflight.execution.gpu import attention
from inflight.execution.gpu.runner import GpuRunner
from inflight.execution.platforms import DEFAULTS, max_samples
from inflight.kv.budget import CONTEXT_MEMORY, GRAPH_MEMORY
from inflight.layers.attention.triton.backend import TritonAttention
from inflight.layers.triton_kernels import TritonKernels
from inflight.loading.checkpoint import quantized_spec
from inflight.loading.planning import PROCESSORS, Devices, plan_devices
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.footprint import META

GPU_MEMORY = 200 * 10**9
ROWS, TOKENS, CONTEXT, BLOCK = 128, 8192, 8192, 16


class AllocatedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors on the meta device that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.device == META:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("qwen3-0.6b", {}),
        ("llama-3.1-8b", {}),
        ("llama-3.1-8b", {"quantization": "fp8"}),
        ("llama-3.1-8b", {"quantization": "int8"}),
        ("llama-3.1-8b", {"quantization": "int4"}),
        ("qwen3-30b-a3b", {"quantization": "fp8"}),
        ("gpt-oss-20b-mxfp4", {}),
        ("qwen3.5-9b", {}),
        ("qwen3.5-9b", {"quantization": "int4"}),
        ("llama-3.1-8b", {"speculative_config": {"method": "suffix"}}),
        ("qwen3.5-9b", {"speculative_config": {"method": "suffix"}}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_weights_buffers_and_largest_step_take_the_planned_memory(
    shape: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(attention, "_num_processors", lambda _: PROCESSORS)
    hf_config, dtype = SHAPES[shape] | {"num_hidden_layers": 4}, torch.bfloat16
    config = EngineConfig.create(
        "-",
        hf_config=hf_config,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=ROWS,
        max_num_batched_tokens=TOKENS,
        block_size=BLOCK,
        gpu_memory_utilization=1.0,
        **options,
    )
    (fit,) = plan_devices(config, Devices("cuda", 1, GPU_MEMORY)).fits
    expected = GPU_MEMORY - CONTEXT_MEMORY - GRAPH_MEMORY - fit.shares[0].kv(fit.num_blocks)
    spec = quantized_spec(decoder_spec(hf_config), config.model)
    with torch.inference_mode(), AllocatedBytes() as allocated:
        decoder = Decoder(
            spec, TritonKernels(dtype, META), TritonAttention(dtype, META), dtype, META, CONTEXT
        )
        samples = max_samples(config.scheduler, DEFAULTS["cuda"])
        gpu_runner = GpuRunner(decoder, 1, BLOCK, ROWS, CONTEXT, TOKENS, graphs=False, max_samples=samples)
        for step in gpu_runner.buckets.largest():
            gpu_runner.warm_up(step)
        gpu_runner.close()
    # The difference is memory that a plan takes from KV blocks, or lacks for them, on a GPU of 24 GB: 1%.
    assert expected == pytest.approx(allocated.most, abs=240 * 10**6)
