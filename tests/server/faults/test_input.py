"""Hostile input: code, pickles and colliding hashes."""

from __future__ import annotations

import ast
import contextlib
import json
from array import array
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import inflight
from inflight import LLM, SamplingParams
from inflight.checkpoint.builtin import checkpoint_folder
from inflight.errors import InflightError
from inflight.kv.prefix_cache import ChainHashCache


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(Path(inflight.__file__).parent.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def test_no_module_imports_an_unpickler() -> None:
    unsafe = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing", "joblib"}
    for path, tree in modules():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not unsafe & {name.partition(".")[0] for name in names}, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), path
                assert node.attr != "recv_pyobj", path


def test_code_in_a_model_folder_is_not_run(tmp_path: Path) -> None:
    """A model folder that refers to its own code is loaded without running it, or rejected."""
    for file in checkpoint_folder().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    trap = tmp_path / "ran"
    for name in ("modeling.py", "tokenization.py", "configuration.py", "sitecustomize.py", "conftest.py"):
        (tmp_path / name).write_text(f"open({str(trap)!r}, 'w')")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "configuration.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(InflightError):  # a refusal is as good
        LLM(str(tmp_path), num_blocks=128).generate([5, 6], SamplingParams(max_tokens=2))
    assert not trap.exists()


def test_prefix_cache_keys_are_sha256_hashes(llm: LLM) -> None:
    """Colliding prefixes would share KV, so keys are SHA-256 hashes of the salt and all tokens before."""
    llm.generate([3] * 64, SamplingParams(max_tokens=1))
    cache = llm._engine.core.scheduler.blocks.cache
    assert isinstance(cache, ChainHashCache)
    hasher = sha256(sha256(b"").digest())
    for _ in range(4):  # blocks
        hasher.update(array("q", [3] * 16).tobytes())
        assert hasher.digest() in cache._bundle_of[0]
