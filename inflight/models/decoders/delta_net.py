"""Gated delta nets, which keep a state of fixed size instead of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.kernels import Residual
from inflight.layers.recurrent import DeltaNetLayer, DeltaNetShape
from inflight.models.decoders.attention import add_output
from inflight.models.decoders.spec import Shard
from inflight.models.decoders.sublayers import (
    LayerBuilder,
    MixerStep,
    features_of,
    norm_targets,
)
from inflight.models.tensors import LinearRows, NormWeight, RowRun, Target, TensorRows, summed_columns


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """Implements `MixerSpec`."""

    shape: DeltaNetShape

    kv = kv_source = rope = None

    @property
    def state_size(self) -> int:
        return self.shape.state_size

    def with_quantized_kv(self, dtype: str) -> DeltaNetSpec:  # noqa: ARG002
        return self

    def step_values(self, num_tokens: int, num_pieces: int) -> int:
        shape = self.shape
        keys = shape.num_value_heads * shape.key_dim
        features = shape.projected_size + shape.conv_size + keys + 2 * shape.value_size
        return num_tokens * features + num_pieces * keys * shape.value_dim  # the states before each piece

    @property
    def kept_values(self) -> int:
        return self.shape.projected_size + self.shape.conv_size

    def decode_values(self, num_processors: int) -> int:  # noqa: ARG002
        return 0

    def check_split(self, size: int) -> None:
        if self.shape.num_key_heads % size:
            raise ConfigError(
                f"tensor_parallel_size is {size}: it must divide the number of key heads of the model's delta nets, "
                f"{self.shape.num_key_heads}"
            )

    def shard(self, shard: Shard) -> DeltaNetSpec:
        shape, size = self.shape, shard.size
        num_key_heads, num_value_heads = shape.num_key_heads // size, shape.num_value_heads // size
        return DeltaNetSpec(replace(shape, num_key_heads=num_key_heads, num_value_heads=num_value_heads))

    def build(self, layer: LayerBuilder) -> DeltaNet:
        return DeltaNet(self, layer)


class DeltaNet:
    """Implements `Mixer`: norm, all projections in one product, the gated delta net, output projection."""

    heads = None

    def __init__(self, whole: DeltaNetSpec, layer: LayerBuilder) -> None:
        shape = whole.shard(layer.shard).shape
        self._spec = layer.spec
        self._shard = layer.shard
        self._whole = whole.shape
        self._kernels = layer.kernels
        self._state = layer.state
        self.projections = layer.linear("delta_net.in", layer.spec.hidden_size, shape.projected_size)
        self.output = layer.output("delta_net.output", shape.value_size)
        self.in_norm, self.out_norm = layer.norms()
        self.layer = DeltaNetLayer(
            shape,
            conv_weight=layer.empty(shape.conv_size, shape.kernel),
            a_log=layer.empty(shape.num_value_heads),
            dt_bias=layer.empty(shape.num_value_heads),
            norm=layer.empty(shape.value_dim),
            eps=layer.spec.norm_eps,
        )

    def __call__(
        self,
        residual: Residual,
        step: MixerStep,
        next_norm: Tensor | None,
        output_tokens: Tensor | None = None,
    ) -> Residual:
        eps = self._spec.norm_eps
        projected = self.projections.normed(residual, eps)
        inputs = step.inputs.state
        mixed = self._kernels.recurrent.delta_net(projected, self.layer, step.states[self._state], inputs)
        return add_output(self.output, residual, mixed, self.out_norm, eps, next_norm, output_tokens)

    def targets(self) -> Mapping[str, Target]:
        layer, whole = self.layer, self._whole
        values = features_of(self._value_heads(), whole.value_dim)
        convolved = self._convolved_rows()
        heads = (RowRun(self._value_heads().start, layer.shape.num_value_heads, 0),)
        return {
            **norm_targets(self._spec, "mixer", in_norm=self.in_norm, out_norm=self.out_norm),
            **self._separate_projections(convolved),
            **self._grouped_projections(),
            "delta_net.conv": TensorRows(
                layer.conv_weight, (whole.conv_size, 1, whole.kernel), convolved, dummy=1 / whole.kernel
            ),
            "delta_net.a_log": TensorRows(layer.a_log, (whole.num_value_heads,), heads, dummy=0.0),
            "delta_net.dt_bias": TensorRows(layer.dt_bias, (whole.num_value_heads,), heads, dummy=0.0),
            "delta_net.norm": NormWeight(layer.norm, whole.value_dim),
            "delta_net.output": summed_columns(self.output, values, whole.value_size, False, False),
        }

    def _key_heads(self) -> range:
        return self._shard.part(self._whole.num_key_heads)

    def _value_heads(self) -> range:
        return self._shard.part(self._whole.num_value_heads)

    def _convolved_rows(self) -> tuple[RowRun, ...]:
        """Return the rows of queries, keys and values, which checkpoints hold in this order."""
        whole = self._whole
        keys = features_of(self._key_heads(), whole.key_dim)
        values = features_of(self._value_heads(), whole.value_dim)
        size = whole.num_key_heads * whole.key_dim
        return (
            RowRun(keys.start, len(keys), 0),
            RowRun(size + keys.start, len(keys), len(keys)),
            RowRun(2 * size + values.start, len(values), 2 * len(keys)),
        )

    def _separate_projections(self, convolved: tuple[RowRun, ...]) -> dict[str, Target]:
        """Return the targets of checkpoints that hold z, b and a apart."""
        local, whole = self.layer.shape, self._whole
        heads = self._value_heads()
        values = features_of(heads, whole.value_dim)
        z_row, b_row = local.conv_size, local.conv_size + local.value_size
        a_row = b_row + local.num_value_heads
        return {
            "delta_net.in.qkv": self._rows(whole.conv_size, *convolved),
            "delta_net.in.z": self._rows(whole.value_size, RowRun(values.start, len(values), z_row)),
            "delta_net.in.b": self._rows(whole.num_value_heads, RowRun(heads.start, len(heads), b_row)),
            "delta_net.in.a": self._rows(whole.num_value_heads, RowRun(heads.start, len(heads), a_row)),
        }

    def _grouped_projections(self) -> dict[str, Target]:
        """Return the targets of checkpoints in which all rows of a key head, and of its value heads, are together."""
        local, whole = self.layer.shape, self._whole
        ratio = whole.num_value_heads // whole.num_key_heads
        keys, values = whole.key_dim, ratio * whole.value_dim
        b_row = local.conv_size + local.value_size
        # In the order of the checkpoint: (rows of a group, where those of the first group go)
        qkvz = (
            (keys, 0),
            (keys, local.num_key_heads * keys),
            (values, 2 * local.num_key_heads * keys),
            (values, local.conv_size),
        )
        ba = ((ratio, b_row), (ratio, b_row + local.num_value_heads))
        targets: dict[str, Target] = {}
        for name, parts in (("delta_net.in.qkvz", qkvz), ("delta_net.in.ba", ba)):
            size = sum(count for count, _ in parts)
            runs = []
            for index, group in enumerate(self._key_heads()):
                row = group * size
                for count, to in parts:
                    runs.append(RowRun(row, count, to + index * count))
                    row += count
            targets[name] = self._rows(size * whole.num_key_heads, *runs)
        return targets

    def _rows(self, count: int, *runs: RowRun) -> LinearRows:
        return LinearRows(self.projections, count, self.projections.in_features, runs, 0, False, False)
