"""Messages between ranks: plain data in msgpack, never pickled.

    rank 0 ── Begin, RankStep, End ──►  all others      through shared memory
    rank 0 ◄────────── Sampled ────────  last stage      through shared memory, where that is not rank 0's own
    rank 0 ◄── Loading, Loaded, Begun, Broken ── each    through a pipe, one line each

The tokens of a step travel with a later step: no rank needs them before, so they need no separate message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from inflight.engine.remote.wire import with_small_numbers
from inflight.execution.parallel.layout import RankLayout
from inflight.processes.channel import RemoteError, array_from_bytes, array_to_bytes
from inflight.scheduling.batch import Admission, Batch, Sampled


class RankStart(msgspec.Struct, frozen=True):
    """The line of JSON that a new rank reads from its standard input."""

    build: str  # module:function that loads its part of the model
    options: dict[str, Any]  # for EngineConfig.create
    rank: int
    layout: RankLayout
    memory: int  # file descriptor of the shared memory
    reports: int  # file descriptor of the pipe for its reports
    parent_id: int
    log_level: int
    log_format: str


# ---- to all ranks ----


class RankMessage(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of the messages that rank 0 sends."""


class Begin(RankMessage, frozen=True):
    """Allocate KV memory and rows."""

    num_blocks: int
    max_rows: int
    max_len: int
    max_tokens: int  # of a step


class SampledIds(msgspec.Struct, array_like=True, frozen=True):
    """The tokens of an earlier step's sampling entries, in order."""

    step: int
    token_ids: list[int]


class RankStep(RankMessage, frozen=True):
    batch: Batch
    sampled: list[SampledIds]


class End(RankMessage, frozen=True):
    """Free what `Begin` allocated."""


# ---- to rank 0 ----


class Report(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages that a rank sends to rank 0."""


class Loading(Report, frozen=True):
    """The rank makes progress loading its weights."""


class Loaded(Report, frozen=True):
    """The rank has loaded its weights."""

    num_blocks: int | None = None  # that fit, where ranks have their own memory


class Begun(Report, frozen=True):
    """The rank is ready for steps."""


class Broken(Report, frozen=True):
    """The rank has failed."""

    error: RemoteError


_encoder = msgspec.msgpack.Encoder(enc_hook=array_to_bytes)
ToRank = Begin | RankStep | End
ToFirst = Loading | Loaded | Begun | Broken
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, dec_hook=array_from_bytes)
_report_decoder: msgspec.json.Decoder[ToFirst] = msgspec.json.Decoder(ToFirst)
decode = _decoder.decode
encode_results = _encoder.encode
decode_results = msgspec.msgpack.Decoder(Sampled).decode
decode_report = _report_decoder.decode


def encode(message: RankMessage) -> bytes:
    try:
        return _encoder.encode(message)
    except OverflowError:
        assert isinstance(message, RankStep)
        return _encoder.encode(msgspec.structs.replace(message, batch=_with_small_numbers(message.batch)))


def encode_report(report: Report) -> bytes:
    return msgspec.json.encode(report) + b"\n"


def _with_small_numbers(batch: Batch) -> Batch:
    admissions = [
        Admission(row, replace(request, params=with_small_numbers(request.params)))
        for row, request in batch.admissions
    ]
    return replace(batch, admissions=admissions)
