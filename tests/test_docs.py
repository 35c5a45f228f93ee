"""Documents name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["request-walk.md", "architecture.md", "models.md", "gpu.md", "cpu.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = set(re.findall(r"`((?:\w+/)*\w+(?:/|\.py|\.cpp))`", text))
    assert len(named) > 10
    names = {path.name for path in (ROOT / "inflight").rglob("*")}  # pages shorten paths within a package

    def exists(name: str) -> bool:
        return (ROOT / "inflight" / name).exists() or (ROOT / name).exists() or name.rstrip("/") in names

    assert sorted(name for name in named if not exists(name)) == []


def test_every_test_that_the_promises_name_exists() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"tests/[\w/]+\.py", text))
    assert len(named) > 20
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []
    modules = set(re.findall(r"python -m benchmarks\.(\w+)", text))
    assert all((ROOT / "benchmarks" / f"{module}.py").is_file() for module in modules)
    promises = re.findall(r"^\| (?!promise|---)(.+?) \| (.+) \|$", text, re.M)
    assert len(promises) > 10
    assert all("`tests/" in tests for _, tests in promises)


def test_every_test_of_a_client_exists() -> None:
    named = set(
        re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / "clients.md").read_text(encoding="utf-8"))
    )
    assert len(named) > 5
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_request_walk_lists_every_file() -> None:
    """A request runs through no file that the page does not name. (How the list is found: tools/request_files.py.)"""
    from tools.request_files import FileTrace, files_of, offline

    trace = FileTrace(has_engine=True)
    try:
        ways = [offline(trace, "cpu")]
    finally:
        trace.stop()
    ways.append(files_of("process", "cpu"))
    text = (ROOT / "docs" / "request-walk.md").read_text()
    for way in ways:
        files = [name.removeprefix("inflight/") for name in way]
        assert len(files) > 30
        assert [name for name in files if f"`{name}`" not in text] == []


# ---- links ----

PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("tools/**/*.md"),
    *ROOT.glob("deploy/**/*.md"),
]
_FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)


def prose_of(page: Path) -> str:
    """A page without its code, in which brackets are no links and # is no heading."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    return re.sub(r"^    .*$", "", text, flags=re.M)


def anchors_of(page: Path) -> set[str]:
    """The places in a page that a link can lead to, as GitHub and the site name them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose_of(page), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        found.add(name if name not in found else f"{name}-1")
    return found


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "code", prose_of(page))
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(target)
    return broken


def test_links_have_targets() -> None:
    assert len(PAGES) > 15
    assert {str(page.relative_to(ROOT)): broken for page in PAGES if (broken := broken_links(page))} == {}


def test_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` page\n\n[1](page.md#a-b-page) [2](#a-b-page) [3](https://x.y/z) `[4](x)`\n\n"
        "```\n[5](x)\n# no heading\n```\n\n[6](no.md) [7](page.md#no-heading) ![8](no.svg)\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["no.md", "page.md#no-heading", "no.svg"]


def test_every_page_of_docs_is_reached_from_the_readme() -> None:
    """Through the pages that it leads to."""
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#]+\.md)", prose_of(page))
        todo += [
            file
            for link in links
            if (file := (page.parent / link).resolve()) not in reached and file.exists()
        ]
    assert sorted(path.name for path in ROOT.glob("docs/*.md") if path not in reached) == []
