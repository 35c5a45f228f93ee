"""Matrices in the formats of quantized checkpoints, written independently of the code that reads them.

Each writer returns the tensors of one module and the matrix that they stand for: computed by the format's own library
where there is one, otherwise element by element.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]
FP8 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds


def compressed(layout: str, **arguments: Any) -> Writer:
    """A writer of compressed-tensors' library for weights with these `QuantizationArgs`."""

    def write(weight: Tensor) -> Written:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        args = QuantizationArgs(**arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
        low, high = _ranges(weight, args)
        scale, zero = calculate_qparams(low, high, args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(layout)
        tensors = compressor.compress(state, scheme)
        expected = compressor.decompress(tensors, scheme)["weight"]
        if args.symmetric:
            tensors.pop("weight_zero_point", None)
        return dict(tensors), expected

    return write


def _ranges(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest weight of everything that shares a scale, in the shape of the scales."""
    rows, columns = weight.shape
    match str(args.strategy):
        case "tensor":
            return weight.min().view(1), weight.max().view(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "group":
            groups = weight.view(rows, -1, args.group_size)
            return groups.amin(-1), groups.amax(-1)
        case _:
            height, width = args.block_structure
            blocks = weight.view(rows // height, height, columns // width, width)
            return blocks.amin((1, 3)), blocks.amax((1, 3))


def block_fp8(rows: int, columns: int, exponents: bool = False) -> Writer:
    """Block fp8 as DeepSeek and Qwen store it. The last blocks may be smaller."""

    def write(weight: Tensor) -> Written:
        shape = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales, codes = torch.empty(shape), torch.empty(weight.shape, dtype=FP8)
        expected = torch.empty(weight.shape)
        for i in range(shape[0]):
            for j in range(shape[1]):
                block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale = weight[block].abs().max() / 448
                scales[i, j] = 2.0 ** scale.log2().ceil() if exponents else scale
                codes[block] = (weight[block] / scales[i, j]).to(FP8)
                expected[block] = codes[block].float() * scales[i, j]
        stored = scales.to(torch.float8_e8m0fnu) if exponents else scales
        return {"weight": codes, "weight_scale_inv": stored}, expected

    return write


def tensor_fp8(weight: Tensor) -> Written:
    """One scale for a whole matrix, and a fixed one for its inputs."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(FP8)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.25)}
    return tensors, codes.float() * scale


def awq(group: int) -> Writer:
    def write(weight: Tensor) -> Written:
        codes, zeros, scales = integers(weight, group, 4, symmetric=False)
        tensors = {
            "qweight": pack(codes.T, AWQ_ORDER),
            "qzeros": pack(zeros.T, AWQ_ORDER),
            "scales": scales.T.half().contiguous(),
        }
        return tensors, dequantized(codes, zeros, scales, torch.arange(weight.shape[1]) // group)

    return write


def gptq(group: int, bits: int = 4, symmetric: bool = True, version: int = 1, ordered: bool = True) -> Writer:
    def write(weight: Tensor) -> Written:
        num_columns = weight.shape[1]
        size = group if group > 0 else num_columns
        order = torch.arange(num_columns)
        if not ordered:
            order = torch.randperm(num_columns, generator=torch.Generator().manual_seed(3))
        codes, zeros, scales = integers(weight[:, order], size, bits, symmetric)
        back = order.argsort()
        codes, group_of = codes[:, back], back // size
        linear = tuple(range(32 // bits))
        tensors = {
            "qweight": pack(codes, linear).T.contiguous(),
            "qzeros": pack(zeros.T - (1 if version == 1 else 0), linear),
            "scales": scales.T.half().contiguous(),
            "g_idx": group_of.int(),
        }
        return tensors, dequantized(codes, zeros, scales, group_of)

    return write


def act_order(group: int) -> Writer:
    """compressed-tensors with columns whose groups are not adjacent. Its library does not write them any more."""

    def write(weight: Tensor) -> Written:
        tensors, expected = gptq(group, ordered=False)(weight)
        codes = unpack(tensors["qweight"].T, 4)
        packed = {
            "weight_packed": pack(codes, tuple(range(8))),
            "weight_scale": tensors["scales"].T.contiguous(),
            "weight_g_idx": tensors["g_idx"],
            "weight_shape": torch.tensor(weight.shape),
        }
        return packed, expected

    return write


def integers(weight: Tensor, group: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned codes [N, K], and zero points and scales [N, groups], scales rounded to float16."""
    groups = weight.view(len(weight), -1, group)
    most = (1 << bits) - 1
    if symmetric:
        scales = (groups.abs().amax(-1) * 2 / most).half().float()
        zeros = torch.full_like(scales, (most + 1) // 2)
    else:
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / most).half().float()
        zeros = (-low / scales).round().clamp(1, most)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    return codes.flatten(1).int(), zeros.int(), scales


def dequantized(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    expected = torch.empty(codes.shape)
    for column, group in enumerate(group_of.tolist()):
        expected[:, column] = (codes[:, column] - zeros[:, group]) * scales[:, group]
    return expected


def pack(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Pack the last dimension into int32; place i of a word, lowest bits first, holds code `order[i]`."""
    bits = 32 // len(order)
    words = codes.long().reshape(*codes.shape[:-1], -1, len(order))
    packed = torch.zeros(words.shape[:-1], dtype=torch.int64)
    for place, index in enumerate(order):
        packed |= words[..., index] << (bits * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def unpack(words: Tensor, bits: int) -> Tensor:
    """Undo `pack` in linear order."""
    parts = [words.long() >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)]
    return torch.stack(parts, -1).flatten(-2).int()


def rewrite(folder: Path, to: Path, write: Mapping[str, Writer], quantization: dict[str, Any]) -> Path:
    """Write a copy of a checkpoint in which modules whose names contain a key of `write` are quantized, and beside it,
    in `plain`, one with the weights that they stand for. Returns the folder of the copy."""
    tensors = load_file(folder / "model.safetensors")
    quantized: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        writer = next((writer for key, writer in write.items() if key in module and tensor.dim() == 2), None)
        if writer is None:
            quantized[name] = plain[name] = tensor
            continue
        parts, plain[name] = writer(tensor)
        quantized |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    config = json.loads((folder / "config.json").read_text())
    for path, content, more in ((to, quantized, quantization), (to / "plain", plain, None)):
        path.mkdir(parents=True)
        save_file({name: tensor.clone() for name, tensor in content.items()}, path / "model.safetensors")
        added = {} if more is None else {"quantization_config": more}
        (path / "config.json").write_text(json.dumps(config | added))
    return to
