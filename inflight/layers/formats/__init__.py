"""Weight formats: how matrices of weights are quantized in memory (`schemes`), and how checkpoints store them.

A `WeightFormat` says which tensors a linear layer has in a checkpoint and turns them into a matrix; its `Scheme` is how
that matrix is held, and the key by which the kernels of a device choose how to multiply it. Layers, loader and planner
know nothing else about a format.
"""

from inflight.layers.formats.schemes import GroupedMatrix, GroupScheme, QuantizedMatrix, Scheme, Weight, plain
from inflight.layers.formats.weight_format import (
    PLAIN,
    FormatTensor,
    PlainFormat,
    QuantizingFormat,
    WeightFormat,
)

__all__ = [
    "PLAIN",
    "FormatTensor",
    "GroupScheme",
    "GroupedMatrix",
    "PlainFormat",
    "QuantizedMatrix",
    "QuantizingFormat",
    "Scheme",
    "Weight",
    "WeightFormat",
    "plain",
]
