"""Finding a checkpoint's files, and refusing those that are unsafe."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import ModelError, WeightsError
from inflight.models.checkpoint import open_checkpoint


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


def test_single_file(folder: Path) -> None:
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


def test_links_into_the_hub_cache_are_fine(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1234").touch()
    (blobs / "5678").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    (snapshot / "config.json").symlink_to("../../blobs/5678")
    assert open_checkpoint(str(snapshot)).weight_files == (snapshot / "model.safetensors",)


def test_missing_shard(folder: Path) -> None:
    write_index(folder, "gone.safetensors")
    with pytest.raises(WeightsError, match=r"gone\.safetensors is missing"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_damaged_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt", "model.pth"])
def test_pickles_are_never_read(folder: Path, name: str) -> None:
    (folder / name).touch()
    with pytest.raises(WeightsError, match=f"only {name}: .* safetensors"):
        open_checkpoint(str(folder))


def test_no_weights(folder: Path) -> None:
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        open_checkpoint(str(folder))
    (folder / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(WeightsError, match="which an index must list"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("text", "words"), [(None, "no config.json"), ("{", "as JSON"), ("[1]", "a JSON object")]
)
def test_damaged_config(folder: Path, text: str | None, words: str) -> None:
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


def test_paths_are_not_looked_for_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for path in (str(folder / "gone"), "./gone", "~/gone-for-sure", "a/b/c"):
        with pytest.raises(ModelError, match="does not exist"):
            open_checkpoint(path)
    with pytest.raises(ModelError, match="is a file"):
        open_checkpoint(str(folder / "config.json"))


def test_hub_client_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import: Callable[..., Any] = builtins.__import__

    def without_hub(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_hub)
    with pytest.raises(ModelError, match=r"install inflight-llm\[hub\]"):
        open_checkpoint("owner/name")


def test_hub_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_args: Any, **_kwargs: Any) -> str:
        raise OSError("offline mode is enabled\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        ModelError, match=r"'owner/name' at revision 'v2' .* OSError: offline mode is enabled$"
    ):
        open_checkpoint("owner/name", revision="v2")


def test_hub_download_asks_for_safe_files_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[dict[str, Any]] = []

    def download(model: str, **kwargs: Any) -> str:
        asked.append({"model": model, **kwargs})
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
    wanted = [
        [name for name in names if any(Path(name).match(pattern) for pattern in call["allow_patterns"])]
        for call in asked
    ]
    assert wanted == [names[:4], names[1:4]]
    folders = ["onnx/model.safetensors", "1_Pooling/config.json", "consolidated.safetensors", "config.json"]
    ignored = asked[0]["ignore_patterns"]
    kept = [name for name in folders if not any(fnmatch(name, pattern) for pattern in ignored)]
    assert kept == ["1_Pooling/config.json", "config.json"]
    assert (asked[0]["model"], asked[0]["revision"], asked[0]["cache_dir"]) == ("owner/name", "v2", "here")
