"""Reading GGUF files, which may be hostile: metadata, the table of tensors, and their bytes.

    GgufFile.open("model.gguf")      parses the header; of a split model, the headers of all its files
    file.metadata["llama.block_count"]
    file.tensors["token_embd.weight"].shape
    file.data(tensor)                its bytes, mapped into memory

Every size, offset and count is checked against the file before anything is allocated, and errors are one line. The
names of metadata keys and of tensors are part of the format; `checkpoint/gguf_config.py`,
`models/gguf_tensors.py` and `frontend/text/gguf_tokenizer.py` know them.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from inflight.checkpoint.fields import Fields
from inflight.checkpoint.files import inside
from inflight.errors import WeightsError, shown

SUFFIX = ".gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32  # of tensor data, unless general.alignment says otherwise

# Limits of a header. The largest known vocabularies have 262,144 tokens.
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 18
MAX_DIMENSIONS = 4
MAX_NAME = 1 << 10  # bytes of a key or of a tensor's name
MAX_TEXT = 16 << 20  # bytes of a string
MAX_HEADER_TEXT = 256 << 20  # bytes of all strings
MAX_ITEMS = 1 << 23  # of all arrays
MAX_DEPTH = 3  # of nested arrays
MAX_ALIGNMENT = 1 << 16
MAX_FILES = 1 << 10

_SPLIT_NAME = re.compile(r"^(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class BlockType:
    """How the values of a tensor are stored: in blocks along a row."""

    name: str
    num_values: int
    num_bytes: int


# By their number in a file.
_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
BLOCK_TYPES = {block.name: block for block in _TYPES.values()}
# The names of the others, for messages.
_OTHER_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}

# Metadata values by the number of their type.
_SCALARS = {
    number: struct.Struct(f"<{code}") for number, code in enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))
}
_SCALARS |= {10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d")}
_UINT32, _UINT64 = _SCALARS[4], _SCALARS[10]
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as the header describes it."""

    name: str
    shape: tuple[int, ...]  # rows first, as everywhere else; files list the row length first
    type: BlockType
    file: Path
    offset: int  # in bytes, from the beginning of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model in one GGUF file, or in several that it is split into."""

    path: Path  # the first file
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, compare=False)

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Parse the header of a file. Any file of a split model stands for all of them."""
        files = _split_files(path)
        headers = [_read_header(file) for file in files]
        if len(files) > 1 or headers[0].metadata.get("split.count", 1) != 1:
            _check_split(files, headers)
        tensors: dict[str, GgufTensor] = {}
        for header in headers:
            for tensor in header.tensors:
                if tensor.name in tensors:
                    raise WeightsError(
                        f"{shown(tensor.name)} is in {tensors[tensor.name].file.name} and again in {tensor.file.name}"
                    )
                tensors[tensor.name] = tensor
        return cls(files[0], headers[0].metadata, tensors)

    @classmethod
    def open_alone(cls, path: Path) -> GgufFile:
        """Parse the header of a file without the others of a split model."""
        header = _read_header(path)
        return cls(path, header.metadata, {tensor.name: tensor for tensor in header.tensors})

    @property
    def fields(self) -> Fields:
        """The metadata, for typed reading."""
        return Fields(self.metadata, str(self.path))

    @property
    def files(self) -> tuple[Path, ...]:
        """All files, the first one first. Only the first has the metadata."""
        return (self.path, *sorted({tensor.file for tensor in self.tensors.values()} - {self.path}))

    def data(self, tensor: GgufTensor) -> memoryview:
        """Return a tensor's bytes, which are read from disk when they are used."""
        mapped = self._maps.get(tensor.file)
        if mapped is None:
            with _opened(tensor.file) as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[tensor.file] = mapped
        end = tensor.offset + tensor.num_bytes
        if end > len(mapped):
            raise WeightsError(f"{tensor.file} has become shorter: it ends before {shown(tensor.name)} does")
        return memoryview(mapped)[tensor.offset : end]


def is_gguf(name: str | Path) -> bool:
    return str(name).lower().endswith(SUFFIX)


def split_pattern(name: str) -> str:
    """Return a glob pattern for the names of all files of a split model; of any other file, its name."""
    match = _SPLIT_NAME.match(name)
    return f"{match['base']}-?????-of-{match['count']}.gguf" if match else name


# ---- split models ----


def _split_files(path: Path) -> tuple[Path, ...]:
    """Return the files of the model that `path` is part of."""
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_FILES:
        raise WeightsError(
            f"{path} is named file {int(match['number'])} of {count}: there may be 1 to {MAX_FILES} files"
        )
    names = [f"{match['base']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    for name in names:
        if name != path.name:  # the user chose this one
            inside(path.parent, name, WeightsError)
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise WeightsError(f"{path.parent / missing[0]} is part of the model but is missing or not a file")
    return tuple(path.parent / name for name in names)


def _check_split(files: tuple[Path, ...], headers: list[_GgufHeader]) -> None:
    for index, (file, header) in enumerate(zip(files, headers, strict=True)):
        number, count = header.metadata.get("split.no"), header.metadata.get("split.count")
        if (number, count) != (index, len(files)):
            raise WeightsError(
                f"{file} has split.no {shown(number)} and split.count {shown(count)}: they must be {index} and "
                f"{len(files)}, as in names like model-{index + 1:05d}-of-{len(files):05d}.gguf"
            )
    total, declared = (
        sum(len(header.tensors) for header in headers),
        headers[0].metadata.get("split.tensors.count"),
    )
    if declared is not None and declared != total:
        raise WeightsError(
            f"{files[0]} has split.tensors.count {shown(declared)}: its files have {total} tensors"
        )


# ---- one file's header ----


@dataclass(frozen=True, slots=True)
class _GgufHeader:
    metadata: dict[str, Any]
    tensors: list[GgufTensor]


def _opened(path: Path) -> BinaryIO:
    try:
        # Opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        raise WeightsError(f"{path} cannot be opened: {problem.strerror}") from problem
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise WeightsError(f"{path} is not a regular file")
    return open(descriptor, "rb", buffering=1 << 20)


def _read_header(path: Path) -> _GgufHeader:
    with _opened(path) as file:
        try:
            return _GgufHeaderReader(path, file).read()
        except OSError as problem:
            raise WeightsError(f"{path} cannot be read: {problem.strerror}") from problem


class _GgufHeaderReader:
    """Reads a header from its beginning to its end."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._position = 0
        self._items_left = MAX_ITEMS
        self._text_left = MAX_HEADER_TEXT

    def read(self) -> _GgufHeader:
        if self._take(4) != MAGIC:
            raise self._error("it does not begin with the letters GGUF, so it is not a GGUF file")
        version = self._scalar(_UINT32)
        if version & 0xFFFF == 0:
            raise self._error("it is in big-endian byte order, which is not supported: convert it again")
        if version not in VERSIONS:
            raise self._error(f"its version is {version}: it must be 2 or 3")
        num_tensors = self._count("tensors", MAX_TENSORS)
        num_keys = self._count("metadata keys", MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text(MAX_NAME, "a metadata key")
            if key in metadata:
                raise self._error(f"it has {shown(key)} twice")
            metadata[key] = self._value(key, self._scalar(_UINT32), 0)
        tensors = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        powers = [1 << power for power in range(3, MAX_ALIGNMENT.bit_length())]
        if type(alignment) is not int or alignment not in powers:
            raise self._error(
                f"general.alignment is {shown(alignment)}: it must be a power of two from 8 to {MAX_ALIGNMENT}"
            )
        start = -(-self._position // alignment) * alignment
        return _GgufHeader(metadata, self._placed(tensors, start, alignment))

    def _tensor_info(self) -> GgufTensor:
        """Return a tensor whose offset is still relative to the data."""
        name = self._text(MAX_NAME, "a tensor's name")
        num_dimensions = self._scalar(_UINT32)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(
                f"{shown(name)} has {num_dimensions} dimensions: there must be 1 to {MAX_DIMENSIONS}"
            )
        shape = tuple(self._scalar(_UINT64) for _ in range(num_dimensions))[::-1]
        number = self._scalar(_UINT32)
        block = _TYPES.get(number)
        if block is None:
            stored = _OTHER_TYPES.get(number, f"type {number}")
            raise self._error(
                f"{shown(name)} is stored as {stored}: it must be one of {', '.join(BLOCK_TYPES)}"
            )
        if 0 in shape or prod(shape) >= 1 << 60:
            raise self._error(f"{shown(name)} has shape {list(shape)}: it must have 1 to 2^60 values")
        if shape[-1] % block.num_values:
            raise self._error(
                f"{shown(name)} has rows of {shape[-1]} values: {block.name} has blocks of {block.num_values}"
            )
        num_bytes = prod(shape) // block.num_values * block.num_bytes
        return GgufTensor(name, shape, block, self._path, self._scalar(_UINT64), num_bytes)

    def _placed(self, tensors: list[GgufTensor], start: int, alignment: int) -> list[GgufTensor]:
        """Return the tensors with their offsets in the file, in that order."""
        placed, names, end = [], set(), start
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            offset = start + tensor.offset
            if tensor.name in names:
                raise self._error(f"it has {shown(tensor.name)} twice")
            if tensor.offset % alignment:
                raise self._error(
                    f"{shown(tensor.name)} is at offset {tensor.offset}: it must be a multiple of {alignment}"
                )
            if offset < end:
                raise self._error(f"{shown(tensor.name)} overlaps the tensor before it")
            end = offset + tensor.num_bytes
            if end > self._size:
                raise self._error(
                    f"{shown(tensor.name)} ends at byte {end}, and the file at {self._size}: it may be truncated"
                )
            names.add(tensor.name)
            placed.append(
                GgufTensor(tensor.name, tensor.shape, tensor.type, self._path, offset, tensor.num_bytes)
            )
        return placed

    def _value(self, key: str, value_type: int, depth: int) -> Any:
        if value_type == _STRING:
            return self._text(MAX_TEXT, shown(key))
        if value_type == _BOOL:
            return self._take(1) != b"\0"
        if value_type in _SCALARS:
            return self._scalar(_SCALARS[value_type])
        if value_type != _ARRAY:
            raise self._error(f"{shown(key)} is of type {value_type}, which does not exist")
        if depth == MAX_DEPTH:
            raise self._error(f"{shown(key)} has arrays nested deeper than {MAX_DEPTH}")
        item_kind, count = self._scalar(_UINT32), self._scalar(_UINT64)
        if count > self._items_left:
            raise self._error(
                f"{shown(key)} has {count} items: at most {MAX_ITEMS} are allowed in all arrays"
            )
        self._items_left -= count
        if item_kind in _SCALARS:
            scalar = _SCALARS[item_kind]
            return list(struct.unpack(f"<{count}{scalar.format[1:]}", self._take(count * scalar.size)))
        return [self._value(key, item_kind, depth + 1) for _ in range(count)]

    def _count(self, what: str, most: int) -> int:
        count: int = self._scalar(_UINT64)
        if count > most:
            raise self._error(f"it claims {count} {what}: at most {most} are allowed")
        return count

    def _text(self, most: int, what: str) -> str:
        length = self._scalar(_UINT64)
        if length > most:
            raise self._error(f"{what} has {length} bytes: at most {most} are allowed")
        self._text_left -= length
        if self._text_left < 0:
            raise self._error(f"its strings have more than {MAX_HEADER_TEXT} bytes")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as problem:
            raise self._error(f"{what} is not UTF-8") from problem

    def _scalar(self, scalar: struct.Struct) -> Any:
        return scalar.unpack(self._take(scalar.size))[0]

    def _take(self, count: int) -> bytes:
        self._position += count
        if self._position > self._size:
            raise self._error("its header ends too early: it may be truncated")
        data = self._file.read(count)
        if len(data) != count:
            raise self._error("it has become shorter while it was read")
        return data

    def _error(self, problem: str) -> WeightsError:
        return WeightsError(f"{self._path} cannot be used: {problem}")
