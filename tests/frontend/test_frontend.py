"""The text side of an engine that runs on another machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from inflight import AsyncEngine
from inflight.checkpoint.builtin import checkpoint_folder
from inflight.config import EngineConfig, RouterConfig
from inflight.engine.client import ModelFacts
from inflight.entrypoints.offline import ReplicatedEngine
from inflight.errors import ModelError
from inflight.frontend.frontend import Frontend
from inflight.server.api_workers.worker import _frontend
from inflight.server.config import ServerConfig
from tests.support.requests import FakeEngine

COMMIT = "4f3ac0ffee4f3ac0ffee4f3ac0ffee4f3ac0ffee"
ENGINE_CACHE = f"/cache-of-the-engine/hub/models--owner--name/snapshots/{COMMIT}"
FACTS = replace(FakeEngine().facts, tokenizer_folder=ENGINE_CACHE)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str | None]]:
    """What this machine gets from the hub: name, revision, folder of the cache."""
    downloaded: list[tuple[str, str | None, str | None]] = []

    def download(
        name: str, revision: str | None, cache_dir: str | None, allow_patterns: list[str], **_: Any
    ) -> str:
        assert "*.safetensors" not in allow_patterns, "weights are the engine's"
        downloaded.append((name, revision, cache_dir))
        return str(checkpoint_folder())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return downloaded


def by_async_engine(config: dict[str, Any], routing: dict[str, Any]) -> Frontend:
    return asyncio.run(AsyncEngine.start(**config, **routing))._frontend


def by_llm(config: dict[str, Any], routing: dict[str, Any]) -> Frontend:
    engine = ReplicatedEngine(EngineConfig.create(**config), RouterConfig(**routing), None)
    engine._end_thread()
    return engine.frontend


def by_api_worker(config: dict[str, Any], routing: dict[str, Any]) -> Frontend:
    return _frontend(ServerConfig.create(**config, **routing), FACTS, 1)


@pytest.mark.parametrize("start", [by_async_engine, by_llm, by_api_worker])
def test_api_server_downloads_the_tokenizer_of_the_engines_commit(
    start: Callable[[dict[str, Any], dict[str, Any]], Frontend],
    downloads: list[tuple[str, str | None, str | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start_router(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(facts=FACTS)

    monkeypatch.setattr("inflight.router.start.start_router", start_router)
    config = {"model": "owner/name", "revision": "main", "download_dir": "here"}
    frontend = start(config, {"ray_address": "auto"})
    assert downloads == [("owner/name", COMMIT, "here")]
    assert frontend.tokenizer is not None
    assert frontend.tokenizer.folder == checkpoint_folder()
    frontend.close()


@pytest.mark.parametrize(
    ("options", "folder", "downloaded"),
    [
        ({}, "/elsewhere/inflight/checkpoint/builtin/checkpoint", []),
        ({"model": str(checkpoint_folder())}, "/elsewhere/model", []),
        ({"model": "owner/name", "tokenizer": "owner/other"}, ENGINE_CACHE, [("owner/other", COMMIT, None)]),
    ],
)
def test_tokenizer_of_an_engine_elsewhere_is_found_here(
    options: dict[str, Any],
    folder: str,
    downloaded: list[Any],
    downloads: list[tuple[str, str | None, str | None]],
) -> None:
    facts = replace(FACTS, tokenizer_folder=folder)
    frontend = Frontend.from_config(EngineConfig.create(**options), facts, on_this_machine=False)
    assert downloads == downloaded
    assert frontend.tokenizer is not None
    frontend.close()


def test_model_folder_missing_on_this_machine_is_an_error(tmp_path: Path) -> None:
    config = EngineConfig.create(str(tmp_path / "model"))
    facts: ModelFacts = replace(FACTS, tokenizer_folder=str(tmp_path / "model"))
    with pytest.raises(ModelError, match="does not exist: pass a checkpoint folder"):
        Frontend.from_config(config, facts, on_this_machine=False)


def test_on_one_machine_the_engines_folder_is_used(
    downloads: list[tuple[str, str | None, str | None]],
) -> None:
    facts = replace(FACTS, tokenizer_folder=str(checkpoint_folder()))
    frontend = Frontend.from_config(EngineConfig.create("owner/name"), facts)
    assert frontend.tokenizer is not None
    assert downloads == []
    frontend.close()
