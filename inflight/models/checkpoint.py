"""A checkpoint on disk: its configs and its weight files, found and vetted before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.errors import ModelError, WeightsError
from inflight.model_files import inside, read_object

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Files in sub-folders and consolidated ones repeat the weights in other formats. Folders that begin with a number are
# modules of sentence-transformers.
REPEATED_FILES = ("[!0-9]*/*", "consolidated*")
TEXT_FILES = ("*.json", "*.jinja", "*.model", "tokenizer*", "*.txt")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`folder` is None for a model made from a config alone."""

    folder: Path | None
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    weight_files: tuple[Path, ...] = ()


def open_checkpoint(
    model: str,
    revision: str | None = None,
    load_format: str = "auto",
    hf_config: Mapping[str, Any] | None = None,
    download_dir: str | None = None,
) -> Checkpoint:
    """Find `model`, a folder or a hub id. With load_format="dummy" no weights are looked for, and with
    `hf_config`, which stands in for config.json, there need not even be a folder. What comes from the hub is kept in
    `download_dir`, or where the hub's client keeps it."""
    dummy = load_format == "dummy"
    if dummy and hf_config is not None and not Path(model).is_dir():
        return Checkpoint(None, dict(hf_config))
    folder = locate_checkpoint(model, revision, download_dir, weights=not dummy)
    config = dict(hf_config) if hf_config is not None else read_object(folder, CONFIG)
    if config is None:
        raise ModelError(f"{folder} has no {CONFIG}: is it the folder of a checkpoint?")
    generation_config = read_object(folder, GENERATION_CONFIG) or {}
    return Checkpoint(folder, config, generation_config, () if dummy else _weight_files(folder))


def locate_checkpoint(model: str, revision: str | None, download_dir: str | None, weights: bool) -> Path:
    """Return the folder of `model`, a folder or a hub id, on this machine. What is missing is downloaded."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(
            f"{model!r} is a file: give the folder that holds {CONFIG} and the safetensors files"
        )
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(
            f"{model!r} does not exist: give a folder with a checkpoint, or a hub id (owner/name)"
        )
    return _download(model, revision, download_dir, weights)


def _download(model: str, revision: str | None, download_dir: str | None, weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"{model!r} is not a folder here, and huggingface_hub, which could find it on the hub, is "
            "not installed: install inflight-llm[hub], or give a folder"
        ) from None
    patterns = [*TEXT_FILES, "*.safetensors"] if weights else list(TEXT_FILES)
    try:
        path = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=list(REPEATED_FILES),
        )
    except Exception as error:  # the hub client raises its own, the HTTP client's and the system's errors
        at = f" at revision {revision!r}" if revision else ""
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"{model!r}{at} is neither a folder here nor could it be had from the hub: "
            f"{type(error).__name__}: {reason[0] if reason else 'no reason given'}"
        ) from error
    return Path(path)


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if (folder / SINGLE).exists():
        return (_vetted(folder, SINGLE),)
    index = read_object(folder, INDEX, WeightsError)
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{folder / INDEX} has no weight_map: it must map tensor names to files")
        return tuple(_vetted(folder, name) for name in sorted({str(file) for file in weight_map.values()}))
    raise WeightsError(f"{folder} has neither {SINGLE} nor {INDEX}{_found_instead(folder)}")


def _found_instead(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    unsafe = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if unsafe:
        return (
            f", only {', '.join(unsafe[:3])}: such files can run code when they are read, so they never are; "
            "convert the checkpoint to safetensors"
        )
    shards = [name for name in names if name.endswith(".safetensors")]
    return f"; it has {', '.join(shards[:3])}, which an index must list" if shards else ""


def _vetted(folder: Path, name: str) -> Path:
    """The file of that name, if it is one, and is in the folder for real."""
    if Path(name).name != name or "\\" in name or name in (".", "..") or not name.endswith(".safetensors"):
        raise WeightsError(f"{folder / INDEX} names the file {name!r}: it must be a plain name.safetensors")
    if not inside(folder, name, WeightsError).is_file():
        raise WeightsError(f"{folder / name} is missing or not a file, though the checkpoint needs it")
    return folder / name
