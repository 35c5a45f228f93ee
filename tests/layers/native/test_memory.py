"""Available memory, also in a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.layers.native import memory


@pytest.mark.parametrize("limit", ["80000", "max"])
def test_page_cache_of_a_container_counts_as_available(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files stay in the page cache while memory is free, above all weights that were just loaded."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("70000\n")
    (tmp_path / "memory.stat").write_text("anon 20000\nfile 50000\ninactive_file 30000\nactive_file 19000\n")
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    actual = memory.available_memory()
    assert actual == 59000 if limit == "80000" else actual > 1 << 20
