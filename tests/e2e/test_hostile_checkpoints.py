"""Checkpoints made to do harm: each is refused at start, in one line, before it takes memory, time or files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.checkpoint.builtin import checkpoint_folder
from inflight.config import EngineConfig
from inflight.errors import ModelError
from inflight.loading.load import load_engine

Harm = Callable[[Path], None]

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/more.jinja",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copied = tmp_path / "model"
    shutil.copytree(checkpoint_folder(), copied)
    return copied


def put(name: str, content: bytes) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return harm


def edit(name: str, **changes: Any) -> Harm:
    def harm(folder: Path) -> None:
        path = folder / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | changes))

    return harm


def link(name: str, target: str) -> Harm:
    def harm(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return harm


def fifo(name: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return harm


def directory(name: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return harm


def huge(name: str) -> Harm:
    """A file of a terabyte that takes no place."""

    def harm(folder: Path) -> None:
        with open(folder / name, "ab") as file:
            file.truncate(1 << 40)

    return harm


def normaliser(charsmap: str) -> Harm:
    return edit("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap})


def index_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    link("model.safetensors.index.json", "/etc/passwd")(folder)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}


def ignoring(*targets: str) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": [*targets],
        "config_groups": groups,
    }


NESTED = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
DEEP = b'{"a":' * 500 + b"1" + b"}" * 500

TABLE: list[tuple[str, Harm, str]] = [
    *(
        (f"{name} is a link to a secret", link(name, "/etc/passwd"), "link out of its folder")
        for name in TEXT_FILES
    ),
    *(
        (f"{name} is a link upwards", link(name, "../secret"), "link out of its folder")
        for name in TEXT_FILES[:4]
    ),
    ("the weights are a link", link("model.safetensors", "/etc/passwd"), "link out of its folder"),
    ("the index is a link", index_link, "link out of its folder"),
    ("a link in a circle", link("config.json", "config.json"), "config.json"),
    ("an endless device", link("config.json", "/dev/zero"), "link out of its folder"),
    *((f"{name} is a pipe", fifo(name), "not a regular file") for name in TEXT_FILES[:4]),
    ("the weights are a pipe", fifo("model.safetensors"), "not a file"),
    ("a folder in place of a file", directory("config.json"), "config.json"),
    *((f"{name} is huge", huge(name), "bytes: at most") for name in TEXT_FILES[:4]),
    ("nested JSON", put("config.json", NESTED), "nested deeper"),
    ("deep JSON", put("tokenizer_config.json", DEEP), "nested deeper"),
    ("a nested generation config", put("generation_config.json", NESTED), "nested deeper"),
    ("a nested tokenizer", put("tokenizer.json", NESTED), "tokenizer.json cannot be used"),
    ("no UTF-8", put("config.json", b'{"a": "\xff\xfe"}'), "cannot be read as JSON"),
    ("a template without UTF-8", put("chat_template.jinja", b"\xff\xfe{{ x }}"), "is not UTF-8"),
    ("an integer of a million digits", put("config.json", b'{"a": ' + b"9" * 1_000_000 + b"}"), "as JSON"),
    *(
        (f"{name} is {value:.0e}", edit("config.json", **{name: value}), f"{name} in config.json")
        for name in ("num_hidden_layers", "head_dim", "max_position_embeddings", "vocab_size", "hidden_size")
        for value in (10**9, 10**30)
    ),
    ("more layers than there are", edit("config.json", num_hidden_layers=4000), "the weights lack"),
    ("more features than there are", edit("config.json", intermediate_size=1 << 24), "config.json requires"),
    ("larger heads than there are", edit("config.json", head_dim=1 << 22), "config.json requires"),
    ("a larger vocabulary", edit("config.json", vocab_size=1 << 24), "config.json requires"),
    ("a number that no float holds", edit("config.json", rms_norm_eps=10**400), "rms_norm_eps"),
    ("an end token that is none", edit("generation_config.json", eos_token_id=10**12), "eos_token_id"),
    ("hot", edit("generation_config.json", do_sample=True, temperature="hot"), "temperature is 'hot'"),
    ("a list for a number", edit("generation_config.json", repetition_penalty=[1]), "repetition_penalty"),
    ("no tokens at all", edit("generation_config.json", max_new_tokens=0), "max_tokens"),
    ("a tokenizer that panics when it is read", normaliser("AAAA"), "the tokenizer panicked"),
    ("a tokenizer that panics when it is used", normaliser("AQAAAAAAAAA="), "the tokenizer panicked"),
    ("a tokenizer that is a list", put("tokenizer.json", b"[]"), "tokenizer.json cannot be used"),
    (
        "more exclusions than can be matched",
        edit("config.json", quantization_config=AWQ | {"modules_to_not_convert": ["x"] * 3_000_000}),
        "the lists and regular expressions in quantization_config of config.json take too long",
    ),
    (
        "an expression that is not regular",
        edit("config.json", quantization_config=ignoring(r"re:(.*)\1")),
        "has groupref, which is not supported",
    ),
    (
        "weights that are cut off",
        lambda folder: os.truncate(folder / "model.safetensors", 100),
        "cannot be read",
    ),
]


@pytest.mark.parametrize(("harm", "words"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_hostile_checkpoint_is_rejected_in_one_line(harm: Harm, words: str, folder: Path) -> None:
    (folder.parent / "secret").write_text("{}")
    harm(folder)
    with pytest.raises(ModelError) as refused:
        load_engine(EngineConfig.create(folder, device="cpu", num_blocks=64))
    message = str(refused.value)
    assert words in message
    assert "\n" not in message
    assert len(message) < 600


def test_huge_context_length_in_the_config_takes_no_memory(folder: Path) -> None:
    edit("config.json", max_position_embeddings=1 << 24)(folder)
    engine = load_engine(EngineConfig.create(folder, device="cpu", num_blocks=64))
    assert engine.frontend.max_model_len == 64 * 16
    engine.close()


def test_expressions_that_would_backtrack_forever_do_not_hold_up_the_start(folder: Path) -> None:
    targets = "re:" + ".?" * 40 + "x", "re:" + "(.|.)" * 40 + "x", "re:(.*)*x"
    edit("config.json", quantization_config=ignoring(*targets))(folder)  # the weights are plain, and so win
    load_engine(EngineConfig.create(folder, device="cpu", num_blocks=64)).close()


def test_folder_itself_can_be_a_link(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    load_engine(EngineConfig.create(folder.parent / "link", device="cpu", num_blocks=64)).close()
