"""What ranks say to each other: plain data, in msgpack, never pickled.

    rank 0 ── Begin, RankStep, End ──►  all others      through shared memory
    rank 0 ◄────────── Sampled ────────  last stage      through shared memory, where that is not rank 0's own
    rank 0 ◄── Loading, Loaded, Begun, Broken ── each    through a pipe, one line each

Tokens that a step drew travel with a later one: no rank needs them before, and so they cost no message of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from inflight.engine.remote.wire import with_small_numbers
from inflight.execution.parallel.layout import RankLayout
from inflight.processes.channel import RemoteError, array_from_bytes, array_to_bytes
from inflight.scheduling import Admission, Batch, Sampled


class RankStart(msgspec.Struct, frozen=True):
    """What a new rank reads on its standard input, as one line of JSON."""

    build: str  # module:function, which loads its part of the model
    options: dict[str, Any]  # of EngineConfig.create
    rank: int
    layout: RankLayout
    memory: int  # descriptors: of the shared memory,
    reports: int  # and of the pipe for what it has to say
    parent_id: int
    log_level: int
    log_format: str


# ---- to all ranks ----


class RankMessage(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The root of what rank 0 says."""


class Begin(RankMessage, frozen=True):
    """Take KV memory and rows."""

    num_blocks: int
    block_size: int
    max_rows: int
    max_len: int
    max_tokens: int  # of a step


class DrawnIds(msgspec.Struct, array_like=True, frozen=True):
    """The tokens that the sampling entries of an earlier step got, in their order."""

    step: int
    token_ids: list[int]


class RankStep(RankMessage, frozen=True):
    batch: Batch
    drawn: list[DrawnIds]


class End(RankMessage, frozen=True):
    """Give back what `Begin` took."""


# ---- to rank 0 ----


class Report(msgspec.Struct, frozen=True, tag=True):
    """The root of what a rank reports."""


class Loading(Report, frozen=True):
    """It makes progress with its weights."""


class Loaded(Report, frozen=True):
    """Its weights are there."""

    num_blocks: int | None = None  # that it has room for, where ranks have memory of their own


class Begun(Report, frozen=True):
    """It is ready for steps."""


class Broken(Report, frozen=True):
    """It cannot go on."""

    error: RemoteError


_encoder = msgspec.msgpack.Encoder(enc_hook=array_to_bytes)
ToRank = Begin | RankStep | End
ToFirst = Loading | Loaded | Begun | Broken
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, dec_hook=array_from_bytes)
_report_decoder: msgspec.json.Decoder[ToFirst] = msgspec.json.Decoder(ToFirst)
_results_decoder: msgspec.msgpack.Decoder[Sampled] = msgspec.msgpack.Decoder(Sampled)


def encode(message: RankMessage) -> bytes:
    try:
        return _encoder.encode(message)
    except OverflowError:
        assert isinstance(message, RankStep)
        return _encoder.encode(msgspec.structs.replace(message, batch=_with_small_numbers(message.batch)))


def decode(data: bytes | memoryview) -> ToRank:
    return _decoder.decode(data)


def encode_results(sampled: Sampled) -> bytes:
    """Of a step, from the rank that samples."""
    return _encoder.encode(sampled)


def decode_results(data: bytes | memoryview) -> Sampled:
    return _results_decoder.decode(data)


def encode_report(report: Report) -> bytes:
    return msgspec.json.encode(report) + b"\n"


def decode_report(line: bytes) -> ToFirst:
    return _report_decoder.decode(line)


def _with_small_numbers(batch: Batch) -> Batch:
    admissions = [
        Admission(row, replace(request, params=with_small_numbers(request.params)))
        for row, request in batch.admissions
    ]
    return replace(batch, admissions=admissions)
