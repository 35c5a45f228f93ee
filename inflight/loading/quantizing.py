"""Write a quantized copy of a checkpoint, in the files of compressed-tensors, which other engines load as well.

    fp8   float-quantized   one scale per output; inputs are quantized per token when the model runs
    int8  int-quantized     the same
    int4  pack-quantized    a scale and a zero point for each group of inputs

The LM head, embeddings, norms and routers stay as they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from inflight.checkpoint.checkpoint import CONFIG, INDEX, SINGLE, TEXT_FILES
from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.layers.formats.packed import pack_words
from inflight.layers.formats.schemes import GroupedMatrix, GroupScheme, unpack_nibbles
from inflight.layers.torch_kernels import TorchKernels
from inflight.loading.checkpoint import model_name, open_configured, plan_model
from inflight.models.decoders.footprint import META, meta_decoder
from inflight.models.decoders.spec import DecoderSpec, whole_shard
from inflight.models.decoders.weights import check_files, placements
from inflight.models.quantization import ON_LOADING, QuantizedOnLoading
from inflight.models.tensors import StoredTensor, open_tensors, read_headers

GROUPS = (128, 64, 32)  # columns; the first size that divides all matrices is used

Progress = Callable[[int, int], None]  # (tensors done, all tensors)


def quantize_checkpoint(config: EngineConfig, out: Path, name: str, progress: Progress | None = None) -> None:
    """Write a copy of the configured checkpoint, with weights as one of `ON_LOADING`, to the folder `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists: pass a new folder")
    checkpoint = open_configured(config, "auto")
    if checkpoint.folder is None:
        raise ConfigError(
            f"{model_name(config)} is not a folder of safetensors files: only those are quantized"
        )
    stored = read_headers(checkpoint.weight_files)
    matrices = _matrices(plan_model(config, checkpoint, lambda _: [0]).spec, stored)
    scheme = _scheme(name, matrices)
    out.mkdir(parents=True, exist_ok=True)
    # Beside the weights: tokenizer, chat template, defaults.
    for path in {path for pattern in TEXT_FILES for path in checkpoint.folder.glob(pattern)}:
        if path.name not in (CONFIG, INDEX) and path.is_file():
            shutil.copyfile(path, out / path.name)
    done = 0
    weight_map: dict[str, str] = {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for file in checkpoint.weight_files:
        tensors: dict[str, Tensor] = {}
        with open_tensors(file) as source:
            for tensor_name in source.keys():  # noqa: SIM118  a file handle, not a mapping
                tensor = source.get_tensor(tensor_name)
                if tensor_name in matrices:
                    module = tensor_name.removesuffix(".weight")
                    parts = encoded(scheme.quantize(tensor.to(device)))
                    tensors |= {f"{module}.{part}": value.cpu() for part, value in parts.items()}
                else:
                    tensors[tensor_name] = tensor
                done += 1
                if progress is not None:
                    progress(done, len(stored))
        save_file(tensors, out / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    if (checkpoint.folder / INDEX).exists() and not (checkpoint.folder / SINGLE).exists():
        size = sum((out / file.name).stat().st_size for file in checkpoint.weight_files)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (out / INDEX).write_text(json.dumps(index, indent=2))
    described = checkpoint.config | {"quantization_config": described_as(scheme, stored, matrices)}
    (out / CONFIG).write_text(json.dumps(described, indent=2))


def _matrices(spec: DecoderSpec, stored: dict[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors to quantize, by name."""
    if spec.quantization.method is not None:
        raise ConfigError(f"the checkpoint is already quantized, as {spec.quantization.method}")
    names = check_files(whole_shard(spec), stored)
    # On loading, the same modules are quantized, whatever the scheme.
    spec = replace(spec, quantization=QuantizedOnLoading(GroupScheme("int8")))
    decoder = meta_decoder(whole_shard(spec), TorchKernels(device=META), torch.float32)
    shapes = {place.name: place.shape for place in placements(decoder, *names) if place.on_device}
    stacked = [name for name, shape in shapes.items() if len(shape) != 2]
    if stacked:
        raise ConfigError(
            f"{stacked[0]} holds the matrices of all experts of a layer: only checkpoints with a tensor for each "
            "expert are quantized"
        )
    return shapes


def _scheme(name: str, matrices: dict[str, tuple[int, ...]]) -> GroupScheme:
    if name != "int4":
        return ON_LOADING[name]
    widths = {shape[1] for shape in matrices.values()}
    group = next((size for size in GROUPS if not any(width % size for width in widths)), None)
    if group is None:
        raise ConfigError(
            f"the matrices have {', '.join(map(str, sorted(widths)))} inputs: for int4, all must be multiples of "
            f"{GROUPS[-1]}"
        )
    return GroupScheme("int4", group, zeros=True)


def encoded(matrix: GroupedMatrix) -> dict[str, Tensor]:
    """Return the tensors in which compressed-tensors stores a matrix."""
    if matrix.scheme.codes != "int4":
        return {"weight": matrix.codes, "weight_scale": matrix.scales}
    assert matrix.zeros is not None
    return {
        "weight_packed": pack_words(unpack_nibbles(matrix.codes).int(), 4),
        "weight_scale": matrix.scales.bfloat16(),  # `quantize` chooses scales that are
        "weight_zero_point": pack_words(matrix.zeros.int().T, 4).T.contiguous(),
        "weight_shape": torch.tensor(matrix.shape),
    }


def described_as(
    scheme: GroupScheme, stored: dict[str, StoredTensor], matrices: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return the `quantization_config`."""
    number_type = "float" if scheme.codes == "fp8" else "int"
    weights: dict[str, Any] = {"num_bits": scheme.bits[scheme.codes], "type": number_type, "dynamic": False}
    inputs: dict[str, Any] | None = None
    if scheme.codes == "int4":
        layout = "pack-quantized"
        weights |= {"symmetric": False, "strategy": "group", "group_size": scheme.group}
    else:
        layout = f"{number_type}-quantized"
        weights |= {"symmetric": True, "strategy": "channel"}
        inputs = {"num_bits": 8, "type": number_type, "symmetric": True, "strategy": "token", "dynamic": True}
    unquantized = [name for name, tensor in stored.items() if name not in matrices and len(tensor.shape) == 2]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": sorted({*(name.removesuffix(".weight") for name in unquantized), "lm_head"}),
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }
