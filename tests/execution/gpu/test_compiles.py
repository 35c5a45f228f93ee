"""Launches compile for a GPU. Triton's interpreter does not show this: it accepts what the compiler refuses.

A process without the interpreter runs the GPU's steps on a CPU, with the choices made for an H200 but without launching
anything. Every launch goes through the compiler's front end. The first of each kernel becomes machine code, and the
first with each type of weights or KV cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.shapes import SHAPES

DENSE = SHAPES["tiny"] | {"num_hidden_layers": 1, "head_dim": 64, "intermediate_size": 768}
EXPERTS = SHAPES["tiny-moe"] | {"num_hidden_layers": 1}
SINKS = SHAPES["gpt-oss-20b-mxfp4"] | {
    "num_hidden_layers": 2,
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
RECURRENT = SHAPES["qwen3.5-9b"] | {
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MODELS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (DENSE, {}),
    (DENSE, {"speculative_config": {"method": "suffix"}}),
    (DENSE, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    (DENSE, {"quantization": "int8"}),
    (DENSE, {"quantization": "int4"}),
    (EXPERTS, {}),
    (EXPERTS, {"quantization": "fp8"}),
    (SINKS, {}),
    (RECURRENT, {}),
    (RECURRENT, {"speculative_config": {"method": "suffix"}}),
    (RECURRENT | {"mtp_num_hidden_layers": 1}, {"speculative_config": {"method": "mtp"}}),
]
STEPS = (1, 2, 16, 64, 512)  # tokens
SHARED_MEMORY = 227 << 10  # of a program on an H200


@pytest.mark.timeout(900)  # half a minute of computing, on machines that are busy at times
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, other tests launch these kernels")
def test_launches_compile_for_hopper(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-m", __name__], env=environment, capture_output=True, text=True, timeout=840
    )
    assert result.returncode == 0, result.stdout + result.stderr


class Compiler:
    """Compiles what is launched, and launches nothing."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend

        self.target = GPUTarget("cuda", 90, 32)
        self._backend = make_backend(self.target)
        self._kinds: set[Any] = set()

    def compile(
        self, function: Any, key: Any, signature: dict[str, Any], device: int, constants: Any, options: Any,
        attributes: Any, _warmup: bool,
    ) -> SimpleNamespace:  # fmt: skip
        """Stand in for `JITFunction._do_compile`."""
        import triton
        from triton.compiler import ASTSource

        source = ASTSource(function, signature, constants, attributes)
        kind = function.fn, signature.get("weight"), signature.get("cache")
        if kind in self._kinds:
            self._parse(source, options)
        else:
            self._kinds.add(kind)
            assert triton.compile(source, self.target, vars(options)).metadata.shared <= SHARED_MEMORY
        kernel = SimpleNamespace(launch_metadata=lambda *_: None, run=lambda *_: None)
        kernel.function = kernel.packed_metadata = None
        function.device_caches[device][0][key] = kernel
        return kernel

    def _parse(self, source: Any, options: Any) -> None:
        from triton._C.libtriton import ir

        context = ir.context()
        ir.load_dialects(context)
        self._backend.load_dialects(context)
        functions, modules = self._backend.get_codegen_implementation(options), self._backend.get_module_map()
        module = source.make_ir(self.target, options, functions, modules, context)
        self._backend.make_ttir(module, {}, options, self.target.arch)


def main() -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiler = Compiler()
    target = SimpleNamespace(get_current_target=lambda: compiler.target)
    target.get_current_device = target.get_current_stream = lambda *_: 0
    driver.set_active(target)
    JITFunction._do_compile = lambda *args: compiler.compile(*args)
    for name in (
        "inflight.layers.triton_kernels.supports_pdl",
        "inflight.execution.sampling.triton.sample.supports_pdl",
        "inflight.execution.parallel.device_collective.supports_pdl",
        "inflight.layers.attention.triton.tuning._is_hopper",
        "inflight.layers.triton.medium_linear.can_describe",
    ):
        patch(name, lambda *_: True).start()
    for config, options in MODELS:
        run_steps(config, **options)
    exchange()


def run_steps(config: dict[str, Any], **options: Any) -> None:
    """Run steps of all kinds, padding only."""
    from inflight import LLM
    from inflight.execution import platforms
    from inflight.layers.attention.triton.backend import TritonAttention
    from inflight.layers.triton_kernels import TritonKernels
    from tests.execution.gpu.interpreted import DEVICE, InterpretedPlatform

    class HopperPlatform(InterpretedPlatform):
        def kernels_and_attention(self, dtype: torch.dtype) -> tuple[TritonKernels, TritonAttention]:
            return TritonKernels(dtype, DEVICE), TritonAttention(dtype, DEVICE)

    place = HopperPlatform()
    options |= {"dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": 512, "num_blocks": 600}
    with (
        patch.object(platforms, "platform", lambda _: place),
        LLM(
            "-", hf_config=config, load_format="dummy", skip_tokenizer_init=True, show_progress=False,
            max_model_len=1024, **options,
        ),
    ):  # fmt: skip
        (runner,) = place.runners
        usual = [shape for shape in runner.buckets.usual() if shape.num_tokens in STEPS]
        runner.prepare([*runner.buckets.largest(), *usual])
        runner.warm_up_scoring()


def exchange() -> None:
    from inflight.execution.parallel.device_collective import PeerCollective

    peers = PeerCollective(0, [0, 0], 1 << 20, 0, torch.device("cpu"))
    x, norm = torch.zeros(3, 96, dtype=torch.bfloat16), torch.zeros(96)
    peers.sum(x)
    peers.add_sum(x.clone(), x, norm, 1e-6, None)
    peers.gather(x, [96, 96])


if __name__ == "__main__":
    main()
