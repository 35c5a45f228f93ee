"""What mkdocs asks when it makes the site (`make docs`): pages from outside docs/, and the order of all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from tools.reference_pages import api_page, cli_page

ROOT = Path(__file__).parent.parent
# Files of the repository that are pages of the site, by their names there.
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# The order of pages. Those that are not named here come at the end of `MORE`.
NAV: dict[str, tuple[str, ...]] = {
    "Start": (
        "index.md",
        "continuous-batching.md",
        "compare.md",
        "builtin-model.md",
        "comparison.md",
        "from-vllm.md",
    ),
    "Serve": (
        "server.md",
        "clients.md",
        "agents.md",
        "structured-outputs.md",
        "scoring.md",
        "quantization.md",
        "replicas.md",
        "scaling.md",
    ),
    "Operate": ("deploy.md", "security.md", "performance.md", "performance-notes.md"),
    "Reference": ("options.md", "reference/cli.md", "reference/api.md"),
    "Inside": ("architecture.md", "request-walk.md", "models.md", "gpu.md", "cpu.md"),
    "Project": ("contributing.md", "changelog.md"),
}
MORE = "Inside"


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages that are not in docs/."""
    pages = {to: moved_links((ROOT / source).read_text(encoding="utf-8")) for source, to in MOVED.items()}
    pages |= {"reference/cli.md": cli_page(), "reference/api.md": api_page()}
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    config.nav = nav(file.src_uri for file in files.documentation_pages())
    return files


def moved_links(text: str) -> str:
    """A page of the repository's root with its links as they are from docs/."""
    text = re.sub(r"\]\(docs/", "](", text)
    for source, to in MOVED.items():
        text = text.replace(f"]({source}", f"]({to}")
    return text


def nav(uris: Iterable[str]) -> list[dict[str, list[str]]]:
    """All pages that there are, in order."""
    there = set(uris)
    named = {uri for part in NAV.values() for uri in part}
    parts = {title: [uri for uri in part if uri in there] for title, part in NAV.items()}
    parts[MORE] += sorted(there - named)
    return [{title: part} for title, part in parts.items()]
