"""A checkpoint on disk: its configs and its weight files, found and vetted before anything is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from inflight.config import ModelConfig
from inflight.errors import ModelError, WeightsError
from inflight.model_files import MAX_TOKENIZER_BYTES, inside, read_file, read_object
from inflight.models.builtin import checkpoint_folder

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Files in sub-folders and consolidated ones repeat the weights in other formats. Folders that begin with a number are
# modules of sentence-transformers.
REPEATED_FILES = ("[!0-9]*/*", "consolidated*")
# What a fingerprint covers beside the weights: every file that is read of a checkpoint, and no other. Training leaves
# more in a folder, which changes no answer.
FINGERPRINT_FILES = (
    CONFIG,
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[0-9]*/config.json",
)
SAMPLE = 4096  # bytes of each tensor that a fingerprint covers
MAX_SAMPLES = 4096  # tensors of a file that are sampled
MAX_HEADER = 100 << 20  # bytes; safetensors' own limit
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


def fingerprint(checkpoint: Checkpoint, tokenizer_folder: Path | None = None) -> str:
    """Return a digest that is the same for the same files on any machine, and differs for other weights, another
    tokenizer or another chat template. `tokenizer_folder` is given where the tokenizer is not the checkpoint's own.

    Of the weights it covers the headers and some bytes of every tensor, since training changes a tensor all over: that
    is read in milliseconds, where all of them take as long as loading does."""
    digest = sha256(json.dumps([checkpoint.config, checkpoint.generation_config], sort_keys=True).encode())
    folders = [folder for folder in (checkpoint.folder, tokenizer_folder) if folder is not None]
    for folder in folders:
        names = {str(path.relative_to(folder)) for name in FINGERPRINT_FILES for path in folder.glob(name)}
        for name in sorted(names):
            content = read_file(folder, name, MAX_TOKENIZER_BYTES) or b""
            digest.update(f"{name} {len(content)}\n".encode() + content)
    heads = () if checkpoint.folder is None else sorted(checkpoint.folder.glob("[0-9]*/*.safetensors"))
    for file in (*checkpoint.weight_files, *(head for head in heads if head.is_file())):
        _add_weights(digest, file)
    return digest.hexdigest()


def fingerprint_now(config: ModelConfig) -> str | None:
    """Return the fingerprint of what an engine would load now, or None where that is not in a local folder."""
    tokenizer = None if config.skip_tokenizer_init else config.tokenizer
    folders = [Path(name).expanduser() for name in (config.model or checkpoint_folder(), tokenizer) if name]
    if not all(folder.is_dir() for folder in folders):
        return None
    opened = open_checkpoint(str(folders[0]), load_format=config.load_format, hf_config=config.hf_config)
    return fingerprint(opened, *folders[1:])


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def _add_weights(digest: _Digest, path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        header = os.pread(descriptor, min(length, MAX_HEADER), 8)
        digest.update(f"{path.name} {size}\n".encode() + header)
        for offset in _sampled_offsets(header):
            digest.update(os.pread(descriptor, SAMPLE, 8 + length + offset))
    finally:
        os.close(descriptor)


def _sampled_offsets(header: bytes) -> Iterator[int]:
    """Yield where the middle of each tensor is. A header that cannot be read yields nothing: loading reports it."""
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        places = sorted((int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for entry in entries)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return
    for start, end in places[:: 1 + len(places) // MAX_SAMPLES]:
        if 0 <= start <= end < 1 << 62:
            yield start + max(0, end - start - SAMPLE) // 2


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
