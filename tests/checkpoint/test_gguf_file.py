"""Reading GGUF files: what the format's own package writes, and what nobody should."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.checkpoint import gguf_file
from inflight.checkpoint.gguf_file import GgufFile, split_pattern
from inflight.errors import InflightError, ModelError, WeightsError
from tests.support.gguf_checkpoints import write

MATRIX = np.arange(128, dtype=np.float32).reshape(2, 64)


def make_file(path: Path, alignment: int | None = None, **split: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama", **split)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(3)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_int64("a.negative", -7)
    writer.add_string("a.text", "naïve")
    writer.add_array("an.array.of.text", ["x", "", "yz"])
    writer.add_array("an.array.of.flags", [True, False])
    writer.add_array("an.array.of.numbers", [1.5, -2.5])
    writer.add_tensor("first.weight", MATRIX)
    quantized = gguf.quants.quantize(MATRIX, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("second.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("third.bias", np.ones(5, dtype=np.float16))
    write(writer)
    return path


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_file(tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


@pytest.mark.parametrize("alignment", [None, 64])
def test_header_is_read_as_the_package_wrote_it(tmp_path: Path, alignment: int | None) -> None:
    file = GgufFile.open(make_file(tmp_path / "model.gguf", alignment))
    assert file.fields.string("general.architecture") == "llama"
    assert file.fields.integer("llama.block_count") == 3
    assert (file.fields.number("a.float"), file.metadata["a.flag"], file.metadata["a.negative"]) == (
        0.5,
        True,
        -7,
    )
    assert (file.fields.string("a.text"), file.fields.strings("an.array.of.text")) == (
        "naïve",
        ["x", "", "yz"],
    )
    assert file.metadata["an.array.of.flags"] == [True, False]
    assert file.fields.numbers("an.array.of.numbers", above=-math.inf) == [1.5, -2.5]
    shapes = {name: (tensor.shape, tensor.type.name) for name, tensor in file.tensors.items()}
    assert shapes == {
        "first.weight": ((2, 64), "F32"),
        "second.weight": ((2, 64), "Q8_0"),
        "third.bias": ((5,), "F16"),
    }
    reader = gguf.GGUFReader(file.path)
    for tensor in reader.tensors:
        assert bytes(file.data(file.tensors[tensor.name])) == tensor.data.tobytes()


def test_types_and_sizes_are_the_packages() -> None:
    for number, block in gguf_file._TYPES.items():
        kind = gguf.GGMLQuantizationType[block.name]
        assert (kind.value, gguf.GGML_QUANT_SIZES[kind]) == (number, (block.num_values, block.num_bytes))
    for number, name in gguf_file._OTHER_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == name


def test_metadata_of_the_wrong_type_is_rejected(tmp_path: Path) -> None:
    file = GgufFile.open(make_file(tmp_path / "model.gguf"))
    with pytest.raises(ModelError, match=r"a\.flag in .* is True: it must be an integer"):
        file.fields.integer("a.flag")
    with pytest.raises(ModelError, match=r"has no 'b\.missing', which is required"):
        file.fields.string("b.missing")
    with pytest.raises(ModelError, match=r"an\.array\.of\.text in .*: it must be a list of integers"):
        file.fields.integers("an.array.of.text")


# ---- split models ----


def split_files(folder: Path) -> list[Path]:
    make_file(folder / "model", split_max_tensors=1)
    return sorted(folder.glob("model-*.gguf"))


def test_any_file_of_a_split_model_stands_for_all(tmp_path: Path) -> None:
    files = split_files(tmp_path)
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    whole = GgufFile.open(make_file(tmp_path / "whole.gguf"))
    for path in files:
        model = GgufFile.open(path)
        assert model.files == tuple(files)
        assert model.fields.integer("llama.block_count") == 3
        for name, tensor in whole.tensors.items():
            assert bytes(model.data(model.tensors[name])) == bytes(whole.data(tensor))


def test_split_model_with_files_that_do_not_belong_together_is_rejected(tmp_path: Path) -> None:
    files = split_files(tmp_path)
    second = files[1].read_bytes()
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(WeightsError, match=r"split\.no 2 and split\.count 3: they must be 1 and 3"):
        GgufFile.open(files[0])
    files[1].write_bytes(second)
    renamed = tmp_path / "renamed.gguf"
    os.rename(files[0], renamed)
    with pytest.raises(WeightsError, match=r"model-00001-of-00003\.gguf is part of the model but is missing"):
        GgufFile.open(files[1])
    with pytest.raises(WeightsError, match=r"split\.no 0 and split\.count 3: they must be 0 and 1"):
        GgufFile.open(renamed)


def test_split_file_outside_of_the_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    files = split_files(tmp_path / "model")
    os.rename(files[2], tmp_path / "elsewhere.gguf")
    files[2].symlink_to(tmp_path / "elsewhere.gguf")
    with pytest.raises(WeightsError, match="is a link out of its folder"):
        GgufFile.open(files[0])


@pytest.mark.parametrize("name", ["m-00000-of-00002.gguf", "m-00003-of-00002.gguf", "m-00001-of-99999.gguf"])
def test_impossible_number_of_files_is_rejected(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError, match="there may be 1 to 1024 files"):
        GgufFile.open(tmp_path / name)


def test_split_pattern_matches_all_files() -> None:
    assert split_pattern("a-00002-of-00007.gguf") == "a-?????-of-00007.gguf"
    assert split_pattern("a.gguf") == "a.gguf"


# ---- hostile files ----


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(
    name: str = "w", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, dims: int = 0
) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return text(name) + struct.pack("<I", dims or len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def header(
    pairs: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
    version: bytes = struct.pack("<I", 3),
) -> bytes:
    pairs, infos = pairs or [], infos or []
    counts = (
        len(infos) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    return b"GGUF" + version + struct.pack("<QQ", *counts) + b"".join(pairs) + b"".join(infos)


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 0)


def padded(data: bytes, num_bytes: int = 4096) -> bytes:
    return data + bytes(num_bytes)


HOSTILE = {
    "empty": (b"", "its header ends too early"),
    "another format": (b"PK\3\4" + bytes(100), "does not begin with the letters GGUF"),
    "version 1": (padded(header(version=struct.pack("<I", 1))), "its version is 1: it must be 2 or 3"),
    "big-endian": (padded(header(version=struct.pack(">I", 3))), "big-endian byte order"),
    "number of tensors": (header(num_tensors=1 << 40), "claims 1099511627776 tensors: at most"),
    "number of keys": (header(num_pairs=(1 << 64) - 1), "metadata keys: at most"),
    "truncated header": (header(num_pairs=3), "its header ends too early"),
    "long key": (padded(header(num_pairs=1) + struct.pack("<Q", 1 << 62)), "a metadata key has"),
    "long text": (
        padded(header([text("a") + struct.pack("<IQ", 8, 1 << 50)])),
        "'a' has 1125899906842624 bytes",
    ),
    "huge array": (padded(header([pair("a", 9, struct.pack("<IQ", 10, 1 << 60))])), "items: at most 8388608"),
    "array beyond the end": (header([pair("a", 9, struct.pack("<IQ", 10, 1 << 20))]), "ends too early"),
    "deep nesting": (padded(header([pair("a", 9, nested(100))])), "nested deeper than 3"),
    "unknown value type": (padded(header([pair("a", 77, b"")])), "of type 77, which does not exist"),
    "duplicate key": (padded(header([pair("a", 0, b"\1"), pair("a", 0, b"\2")])), "'a' twice"),
    "text that is not UTF-8": (
        padded(header([pair("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")])),
        "not UTF-8",
    ),
    "no dimensions": (padded(header(infos=[info(shape=())])), "0 dimensions: there must be 1 to 4"),
    "many dimensions": (padded(header(infos=[info(dims=9)])), "9 dimensions: there must be 1 to 4"),
    "no values": (padded(header(infos=[info(shape=(0, 4))])), "must have 1 to 2^60 values"),
    "overflowing size": (padded(header(infos=[info(shape=(1 << 32,) * 4)])), "must have 1 to 2^60 values"),
    "unsupported type": (
        padded(header(infos=[info(kind=21)])),
        "'w' is stored as IQ3_S: it must be one of F32",
    ),
    "unknown type": (padded(header(infos=[info(kind=4711)])), "'w' is stored as type 4711"),
    "part of a block": (padded(header(infos=[info(shape=(33,), kind=8)])), "Q8_0 has blocks of 32"),
    "offset beyond the end": (padded(header(infos=[info(offset=1 << 50)])), "it may be truncated"),
    "offset that overflows": (padded(header(infos=[info(offset=(1 << 64) - 32)])), "it may be truncated"),
    "offset without alignment": (padded(header(infos=[info(offset=4)])), "it must be a multiple of 32"),
    "overlap": (padded(header(infos=[info(), info("v", offset=64)])), "'v' overlaps the tensor before it"),
    "duplicate tensor": (padded(header(infos=[info(), info(offset=128)])), "'w' twice"),
    "truncated data": (header(infos=[info(shape=(1024,))]) + bytes(100), "it may be truncated"),
    "alignment 0": (
        padded(header([pair("general.alignment", 4, struct.pack("<I", 0))])),
        "general.alignment is 0: it must be a power of two",
    ),
    "alignment of text": (
        padded(header([pair("general.alignment", 8, text("x"))])),
        "general.alignment is 'x'",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_rejected_in_one_line(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        GgufFile.open(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_header_claims_are_checked_before_memory_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    many = [pair(str(index), 9, struct.pack("<IQ", 0, 6) + bytes(6)) for index in range(3)]
    path.write_bytes(padded(header(many)))
    GgufFile.open(path)
    monkeypatch.setattr(gguf_file, "MAX_ITEMS", 16)
    with pytest.raises(WeightsError, match="at most 16 are allowed in all arrays"):
        GgufFile.open(path)
    monkeypatch.setattr(gguf_file, "MAX_ITEMS", 18)
    monkeypatch.setattr(gguf_file, "MAX_HEADER_TEXT", 2)
    with pytest.raises(WeightsError, match="its strings have more than 2 bytes"):
        GgufFile.open(path)


def test_pipe_and_folder_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(WeightsError, match="is not a regular file"):
        GgufFile.open(tmp_path / "pipe.gguf")
    with pytest.raises(WeightsError, match="cannot be opened: No such file"):
        GgufFile.open(tmp_path / "missing.gguf")


def test_file_that_shrinks_after_it_was_opened_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    file = GgufFile.open(path)
    os.truncate(path, len(content) // 2)
    with pytest.raises(WeightsError, match="has become shorter"):
        file.data(file.tensors["third.bias"])


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_file_is_read_or_rejected_in_one_line(
    data: st.DataObject, tmp_path: Path, content: bytes
) -> None:
    damaged = bytearray(content[: data.draw(st.integers(0, len(content)), label="length")])
    for _ in range(data.draw(st.integers(0, 4), label="changes") if damaged else 0):
        position = data.draw(st.integers(0, len(damaged) - 1), label="position")
        damaged[position] = data.draw(st.integers(0, 255), label="byte")
    path = tmp_path / "model.gguf"
    path.write_bytes(damaged)
    problem = ""
    try:
        file = GgufFile.open(path)
        assert all(len(file.data(tensor)) == tensor.num_bytes for tensor in file.tensors.values())
    except InflightError as error:
        problem = str(error)
    assert "\n" not in problem
