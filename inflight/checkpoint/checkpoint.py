"""A checkpoint on disk: locate or download it, read its configs, list its weight files, fingerprint it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from inflight.checkpoint.builtin import BUILTIN_MODELS, checkpoint_folder
from inflight.checkpoint.files import MAX_TOKENIZER_BYTES, inside, read_file, read_object
from inflight.checkpoint.gguf_config import GGUF_FIELD, gguf_config, gguf_generation_config
from inflight.checkpoint.gguf_file import GgufFile, is_gguf, split_pattern
from inflight.config import ModelConfig
from inflight.errors import ModelError, WeightsError

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Files in sub-folders and consolidated ones repeat the weights in other formats. Folders that begin with a number are
# modules of sentence-transformers.
REPEATED_FILES = ("[!0-9]*/*", "consolidated*")
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # -> the method
# The files, besides the weights, that a fingerprint covers: every file that is read from a checkpoint. Other files that
# training leaves in the folder do not affect the output.
FINGERPRINT_FILES = (
    CONFIG,
    GENERATION_CONFIG,
    *QUANTIZATION_FILES,
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
    """An opened checkpoint: a folder, a GGUF file, or neither, for a model made from a config alone."""

    folder: Path | None
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    weight_files: tuple[Path, ...] = ()
    gguf: GgufFile | None = None

    @property
    def tokenizer_path(self) -> Path | None:
        """The folder or the GGUF file that has the tokenizer."""
        return self.folder if self.gguf is None else self.gguf.path


def open_checkpoint(
    model: str,
    revision: str | None = None,
    load_format: str = "auto",
    hf_config: Mapping[str, Any] | None = None,
    download_dir: str | None = None,
) -> Checkpoint:
    """Open `model`, a folder, a hub id, a GGUF file, or one of a hub repository (owner/name:file.gguf).

    With load_format="dummy" no weights are needed; with `hf_config`, which replaces config.json, not even a folder is.
    Downloads go to `download_dir`, by default to the hub client's own cache.
    """
    dummy = load_format == "dummy"
    if dummy and hf_config is not None and not Path(model).is_dir():
        return Checkpoint(None, dict(hf_config))
    folder = locate_checkpoint(model, revision, download_dir, weights=not dummy)
    if folder.is_file():
        return _open_gguf(folder, dummy, hf_config)
    config = dict(hf_config) if hf_config is not None else read_object(folder, CONFIG)
    if config is None:
        raise ModelError(f"{folder} has no {CONFIG}: is it the folder of a checkpoint?")
    if hf_config is None and config.get("quantization_config") is None:
        config |= _separate_quantization(folder)
    generation_config = read_object(folder, GENERATION_CONFIG) or {}
    return Checkpoint(folder, config, generation_config, () if dummy else _weight_files(folder))


def _separate_quantization(folder: Path) -> dict[str, Any]:
    """Return the quantization that older checkpoints describe in a separate file, as config.json would."""
    for name, method in QUANTIZATION_FILES.items():
        described = read_object(folder, name)
        if described is not None:
            return {"quantization_config": {"quant_method": method, **described}}
    return {}


def _open_gguf(path: Path, dummy: bool, hf_config: Mapping[str, Any] | None) -> Checkpoint:
    file = GgufFile.open(path)
    config = gguf_config(file)
    if hf_config is not None:
        config = {**hf_config, **{key: config[key] for key in (GGUF_FIELD, "quantization_config")}}
    return Checkpoint(None, config, gguf_generation_config(file), () if dummy else file.files, file)


def fingerprint(
    checkpoint: Checkpoint, tokenizer_folder: Path | None = None, model: ModelConfig | None = None
) -> str:
    """Return a digest that is equal for equal files on any machine, and differs for other weights, another tokenizer
    or another chat template. Pass `tokenizer_folder`, which may be a GGUF file, if the tokenizer is not the
    checkpoint's own, and the configuration, which may change weights while they are loaded.

    Weights are sampled: the digest covers the headers and some bytes of every tensor, since training changes a tensor
    everywhere. This takes milliseconds; reading all bytes would take as long as loading.
    """
    digest = sha256(json.dumps([checkpoint.config, checkpoint.generation_config], sort_keys=True).encode())
    if model is not None and model.quantization is not None:
        digest.update(f"quantization {model.quantization} {model.quantize_head}\n".encode())
    sources = [source for source in (checkpoint.tokenizer_path, tokenizer_folder) if source is not None]
    for folder in sources:
        if is_gguf(folder):
            _add_gguf(digest, folder, weights=False)
        names = {str(path.relative_to(folder)) for name in FINGERPRINT_FILES for path in folder.glob(name)}
        for name in sorted(names):
            content = read_file(folder, name, MAX_TOKENIZER_BYTES) or b""
            digest.update(f"{name} {len(content)}\n".encode() + content)
    heads = () if checkpoint.folder is None else sorted(checkpoint.folder.glob("[0-9]*/*.safetensors"))
    for file in (*checkpoint.weight_files, *(head for head in heads if head.is_file())):
        _add_weights(digest, file)
    return digest.hexdigest()


def fingerprint_now(config: ModelConfig) -> str | None:
    """Return the fingerprint of the files an engine would load now, or None if they are not in a local folder."""
    tokenizer = None if config.skip_tokenizer_init else config.tokenizer
    names = [str(name) for name in (config.model or checkpoint_folder(), tokenizer) if name]
    folders = [local_folder(name) for name in names]
    if not all(folder.is_dir() or (is_gguf(folder) and folder.is_file()) for folder in folders):
        return None
    opened = open_checkpoint(str(folders[0]), load_format=config.load_format, hf_config=config.hf_config)
    return fingerprint(opened, folders[1] if len(folders) > 1 else None, config)


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def _add_gguf(digest: _Digest, path: Path, weights: bool) -> None:
    """Add the header of a GGUF file, and with `weights` some bytes of each tensor."""
    file = GgufFile.open_alone(path)
    tensors = sorted(file.tensors.values(), key=lambda tensor: tensor.offset)
    with path.open("rb") as opened:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(opened.read(tensors[0].offset if tensors else -1))
        for tensor in tensors[:: 1 + len(tensors) // MAX_SAMPLES] if weights else ():
            opened.seek(tensor.offset + max(0, tensor.num_bytes - SAMPLE) // 2)
            digest.update(opened.read(min(SAMPLE, tensor.num_bytes)))


def _add_weights(digest: _Digest, path: Path) -> None:
    if is_gguf(path):
        return _add_gguf(digest, path, weights=True)
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
    """Yield the offset of each tensor's middle. An unreadable header yields nothing: loading will report it."""
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        spans = sorted((int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for entry in entries)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return
    for start, end in spans[:: 1 + len(spans) // MAX_SAMPLES]:
        if 0 <= start <= end < 1 << 62:
            yield start + max(0, end - start - SAMPLE) // 2


def locate_checkpoint(model: str, revision: str | None, download_dir: str | None, weights: bool) -> Path:
    """Return the local folder or GGUF file of `model`: a path, a built-in model, a hub id, or a GGUF file of a hub
    repository. Missing files are downloaded."""
    folder = local_folder(model)
    if folder.is_dir() or (folder.is_file() and is_gguf(folder)):
        return folder
    if folder.exists():
        raise ModelError(
            f"{model!r} is a file: pass a GGUF file, or the folder that contains {CONFIG} and the safetensors files"
        )
    repository, colon, name = model.partition(":")
    if colon and is_gguf(name) and repository.count("/") == 1 and not repository.startswith((".", "~", "/")):
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise ModelError(f"{model!r} names the file {name!r}: it must be inside the repository")
        return _download(repository, revision, download_dir, [split_pattern(name)], []) / name
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(
            f"{model!r} does not exist: pass a checkpoint folder, a GGUF file or a hub id (owner/name)"
        )
    patterns = [*TEXT_FILES, "*.safetensors"] if weights else list(TEXT_FILES)
    return _download(model, revision, download_dir, patterns, list(REPEATED_FILES))


def local_folder(model: str) -> Path:
    """Return the folder that a name means on this machine, which need not exist. Folders hide built-in models."""
    folder = Path(model).expanduser()
    return folder if folder.exists() else BUILTIN_MODELS.get(model, folder)


def _download(
    model: str, revision: str | None, download_dir: str | None, patterns: list[str], ignored: list[str]
) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"{model!r} is not a local folder, and huggingface_hub, which could download it, is "
            "not installed: install inflight-llm[hub], or pass a folder"
        ) from None
    try:
        path = snapshot_download(
            model, revision=revision, cache_dir=download_dir, allow_patterns=patterns, ignore_patterns=ignored
        )
    except Exception as error:  # the hub client raises its own, the HTTP client's and the system's errors
        revision_text = f" at revision {revision!r}" if revision else ""
        raise ModelError(
            f"{model!r}{revision_text} is not a local folder and could not be downloaded: {_hub_reason(error)}"
        ) from error
    return Path(path)


def _hub_reason(error: BaseException) -> str:
    """Return what to do about an error of the hub client."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # why the hub was not asked, or did not answer
    lines = str(error).strip().splitlines() or ["no reason given"]
    reasons = {
        GatedRepoError: "it is gated: accept its conditions on the hub's page, and set HF_TOKEN",
        RepositoryNotFoundError: "the hub has no such model, or it is private: check the name, or set HF_TOKEN",
        RevisionNotFoundError: "the hub has no such revision",
        HFValidationError: f"it is not a valid hub id: it must be owner/name ({lines[0]})",
        OfflineModeIsEnabled: "HF_HUB_OFFLINE is set, and the model is not in the cache",
        HfHubHTTPError: f"the hub answered with an error: {lines[0]}",
    }
    for error_type, reason in reasons.items():  # derived classes first
        if isinstance(error, error_type):
            return reason
    if _is_network_error(error):
        return "the hub cannot be reached: check the network, or pass a folder"
    return f"{type(error).__name__}: {lines[0]}"


def _is_network_error(error: BaseException) -> bool:
    """Return whether an error, or one that caused it, is a failed connection of the hub's HTTP client."""
    names = {base.__name__ for base in type(error).__mro__}
    if isinstance(error, ConnectionError | TimeoutError) or names & {"TransportError", "RequestException"}:
        return True
    return error.__cause__ is not None and _is_network_error(error.__cause__)


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if (folder / SINGLE).exists():
        return (_vetted(folder, SINGLE),)
    index = read_object(folder, INDEX, WeightsError)
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{folder / INDEX} has no weight_map: it must map tensor names to files")
        return tuple(_vetted(folder, name) for name in sorted({str(file) for file in weight_map.values()}))
    raise WeightsError(f"{folder} has neither {SINGLE} nor {INDEX}{_other_weight_files(folder)}")


def _other_weight_files(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    unsafe = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if unsafe:
        return (
            f", only {', '.join(unsafe[:3])}: such files can run code when they are loaded, so they are never read; "
            "convert the checkpoint to safetensors"
        )
    if gguf := [name for name in names if is_gguf(name)]:
        return f"; it has {', '.join(gguf[:3])}: pass the path of a GGUF file instead of its folder"
    shards = [name for name in names if name.endswith(".safetensors")]
    return f"; it has {', '.join(shards[:3])}, which must be listed in an index" if shards else ""


def _vetted(folder: Path, name: str) -> Path:
    """Return the path of a weight file after checking that it is a regular file inside the folder."""
    if Path(name).name != name or "\\" in name or name in (".", "..") or not name.endswith(".safetensors"):
        raise WeightsError(f"{folder / INDEX} names the file {name!r}: it must be a plain name.safetensors")
    if not inside(folder, name, WeightsError).is_file():
        raise WeightsError(f"{folder / name} is needed by the checkpoint but is missing or not a file")
    return folder / name
