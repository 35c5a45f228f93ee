"""How much memory there is, in a container too."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.native import memory


@pytest.mark.parametrize("limit", ["80000", "max"])
def test_files_that_a_container_has_read_take_no_memory(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in memory as long as there is room: weights that were just loaded, above all."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("70000\n")
    (tmp_path / "memory.stat").write_text("anon 20000\nfile 50000\ninactive_file 30000\nactive_file 19000\n")
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    found = memory.available_memory()
    assert found == 59000 if limit == "80000" else found > 1 << 20
