"""Finding a checkpoint's files, and rejecting unsafe ones."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inflight.checkpoint import checkpoint as checkpoint_module
from inflight.checkpoint.builtin import BUILTIN_MODELS
from inflight.checkpoint.checkpoint import fingerprint, fingerprint_now, open_checkpoint
from inflight.config import ModelConfig
from inflight.errors import ModelError, WeightsError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config and no weights."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def write_index(folder: Path, *files: str) -> None:
    weight_map = {f"tensor.{i}": file for i, file in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_single_weight_file_is_found(folder: Path) -> None:
    (folder / "model.safetensors").touch()
    (folder / "generation_config.json").write_text('{"top_k": 3}')
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.folder == folder
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {"top_k": 3}
    assert checkpoint.weight_files == (folder / "model.safetensors",)


def test_shards_come_from_the_index(folder: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "unlisted.safetensors"):
        (folder / name).touch()
    write_index(folder, "b.safetensors", "a.safetensors", "b.safetensors")
    assert open_checkpoint(str(folder)).weight_files == (folder / "a.safetensors", folder / "b.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "../out.safetensors",
        "/etc/out.safetensors",
        "sub/out.safetensors",
        "..",
        "a\\b.safetensors",
        "a.bin",
        "",
    ],
)
def test_index_entries_must_be_plain_names(folder: Path, name: str) -> None:
    (folder.parent / "out.safetensors").touch()
    (folder / "sub").mkdir()
    (folder / "sub" / "out.safetensors").touch()
    write_index(folder, name)
    with pytest.raises(WeightsError, match="must be a plain name"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "shard.safetensors"])
def test_links_must_not_leave_the_folder(folder: Path, name: str) -> None:
    outside = folder.parent / "outside.safetensors"
    outside.touch()
    (folder / name).symlink_to(outside)
    write_index(folder, name)
    with pytest.raises(WeightsError, match="link out of its folder"):
        open_checkpoint(str(folder))


def test_links_into_the_hub_cache_are_allowed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1234").touch()
    (blobs / "5678").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    (snapshot / "config.json").symlink_to("../../blobs/5678")
    assert open_checkpoint(str(snapshot)).weight_files == (snapshot / "model.safetensors",)


def test_missing_shard_is_rejected(folder: Path) -> None:
    write_index(folder, "gone.safetensors")
    with pytest.raises(WeightsError, match=r"gone\.safetensors is .* missing"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_damaged_index_is_rejected(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt", "model.pth"])
def test_pickles_are_never_read(folder: Path, name: str) -> None:
    (folder / name).touch()
    with pytest.raises(WeightsError, match=f"only {name}: .* safetensors"):
        open_checkpoint(str(folder))


def test_folder_without_weights_is_rejected(folder: Path) -> None:
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        open_checkpoint(str(folder))
    (folder / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(WeightsError, match="which must be listed in an index"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("text", "words"), [(None, "no config.json"), ("{", "as JSON"), ("[1]", "a JSON object")]
)
def test_damaged_config_is_rejected(folder: Path, text: str | None, words: str) -> None:
    config = folder / "config.json"
    config.unlink() if text is None else config.write_text(text)
    with pytest.raises(ModelError, match=words):
        open_checkpoint(str(folder))


def test_config_can_be_replaced(folder: Path) -> None:
    (folder / "model.safetensors").touch()
    assert open_checkpoint(str(folder), hf_config={"a": 1}).config == {"a": 1}


def test_dummy_needs_no_weights_and_no_folder(folder: Path) -> None:
    assert open_checkpoint(str(folder), load_format="dummy").config == {"model_type": "llama"}
    checkpoint = open_checkpoint("any name", load_format="dummy", hf_config={"a": 1})
    assert (checkpoint.folder, checkpoint.config, checkpoint.weight_files) == (None, {"a": 1}, ())


def test_paths_are_never_looked_up_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for path in (str(folder / "gone"), "./gone", "~/gone-for-sure", "a/b/c"):
        with pytest.raises(ModelError, match="does not exist"):
            open_checkpoint(path)
    with pytest.raises(ModelError, match="is a file"):
        open_checkpoint(str(folder / "config.json"))


def test_built_in_models_are_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for name, folder in BUILTIN_MODELS.items():
        assert open_checkpoint(name).folder == folder
        assert fingerprint_now(ModelConfig(name)) == fingerprint_now(ModelConfig(str(folder)))
    monkeypatch.chdir(tmp_path)
    local = tmp_path / "inflight-builtin"
    local.mkdir()
    (local / "config.json").write_text("{}")
    (local / "model.safetensors").touch()
    assert open_checkpoint("inflight-builtin").folder == Path("inflight-builtin"), (
        "a local folder comes first"
    )


def test_missing_hub_client_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import: Callable[..., Any] = builtins.__import__

    def without_hub(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_hub)
    with pytest.raises(ModelError, match=r"install inflight-llm\[hub\]"):
        open_checkpoint("owner/name")


def test_hub_errors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_args: Any, **_kwargs: Any) -> str:
        raise OSError("offline mode is enabled\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        ModelError, match=r"'owner/name' at revision 'v2' .* OSError: offline mode is enabled$"
    ):
        open_checkpoint("owner/name", revision="v2")


def test_hub_download_requests_safe_files_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    downloads: list[dict[str, Any]] = []

    def download(model: str, **kwargs: Any) -> str:
        downloads.append({"model": model, **kwargs})
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (folder / "model.safetensors").touch()
    assert open_checkpoint("owner/name", revision="v2", download_dir="here").folder == folder
    open_checkpoint("owner/name", load_format="dummy")
    names = [
        "model.safetensors",
        "tokenizer.model",
        "chat_template.jinja",
        "config.json",
        "pytorch_model.bin",
        "x.py",
    ]
    expected = [
        [name for name in names if any(Path(name).match(pattern) for pattern in call["allow_patterns"])]
        for call in downloads
    ]
    assert expected == [names[:4], names[1:4]]
    folders = ["onnx/model.safetensors", "1_Pooling/config.json", "consolidated.safetensors", "config.json"]
    ignored = downloads[0]["ignore_patterns"]
    kept = [name for name in folders if not any(fnmatch(name, pattern) for pattern in ignored)]
    assert kept == ["1_Pooling/config.json", "config.json"]
    assert (downloads[0]["model"], downloads[0]["revision"], downloads[0]["cache_dir"]) == (
        "owner/name",
        "v2",
        "here",
    )


# ---- fingerprints ----


def weights(**changes: float) -> dict[str, torch.Tensor]:
    """Tensors of several sizes; a change is added to all of one."""
    shapes = {"embed": (1000, 64), "norm": (64,), "layer": (64, 64)}
    return {name: torch.full(shape, 1.0) + changes.get(name, 0.0) for name, shape in shapes.items()}


@pytest.fixture
def loadable(folder: Path) -> Path:
    save_file(weights(), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def known_as(folder: Path) -> str:
    return fingerprint(open_checkpoint(str(folder)))


def test_copies_have_one_fingerprint(loadable: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(loadable, tmp_path / "elsewhere")
    os.utime(copy / "model.safetensors", (0, 0))
    (copy / "trainer_state.json").write_text("{}")  # which nobody reads
    assert known_as(copy) == known_as(loadable)


@pytest.mark.parametrize("name", ["embed", "norm", "layer"])
def test_changed_tensor_changes_the_fingerprint(loadable: Path, name: str) -> None:
    before = known_as(loadable)
    save_file(weights(**{name: 0.5}), loadable / "model.safetensors")
    assert known_as(loadable) != before


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "tokenizer_config.json",
    ],
)
def test_changed_text_file_changes_the_fingerprint(loadable: Path, name: str) -> None:
    before = known_as(loadable)
    (loadable / name).write_text('{"model_type": "llama", "new": 1}')
    assert known_as(loadable) != before


def test_fingerprint_covers_a_separate_tokenizer(loadable: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text('{"version": "2"}')
    opened = open_checkpoint(str(loadable))
    assert fingerprint(opened, other) != fingerprint(opened)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 16,
        (7).to_bytes(8, "little") + b"[1,2,3]",
        (34).to_bytes(8, "little") + b'{"a": {"data_offsets": [-9, "12"]}}',
        (40).to_bytes(8, "little") + b'{"a": {"data_offsets": [9, 1e400000000]}}',
    ],
)
def test_damaged_weights_have_a_fingerprint_too(folder: Path, content: bytes) -> None:
    """Loading reports the damage; the fingerprint does not."""
    (folder / "model.safetensors").write_bytes(content)
    assert len(known_as(folder)) == 64


def test_fingerprint_reads_a_bounded_part_of_the_weights(
    loadable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    read = os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return read(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    save_file({f"t{index}": torch.zeros(2000) for index in range(100)}, loadable / "model.safetensors")
    known_as(loadable)
    assert len(sizes) == 2 + 100
    monkeypatch.setattr(checkpoint_module, "MAX_SAMPLES", 10)
    sizes.clear()
    known_as(loadable)
    assert len(sizes) == 2 + 10
    assert max(sizes[2:]) == checkpoint_module.SAMPLE
