"""`inflight embed` and `inflight rerank`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console

from inflight.cli.option_sources import with_flags
from inflight.config import ENGINE_OPTIONS
from inflight.errors import PromptError
from inflight.interrupts import interrupts_end_at_once
from inflight.outputs import RerankResult

if TYPE_CHECKING:
    from inflight.entrypoints.llm import LLM

# The engine's options that these commands have flags for.
POOLING_OPTIONS = (
    "device",
    "dtype",
    "load_format",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
)
STDIN = "-"
FIRST_CHARACTERS = 400  # of a document, of which the table shows as many as fit

_MODEL = typer.Option("--model", "-m", help="A folder or a hub id.", show_default="the built-in one")
_TRUNCATE = typer.Option(help="Cut texts that are longer than the model reads, or refuse them.")
_FILES = typer.Argument(
    help="Each file is a document; of one file, or of - (standard input), each line is one."
)
_TEXTS = typer.Argument(help="Texts; - is standard input, one text per line.")


@with_flags((ENGINE_OPTIONS[name] for name in POOLING_OPTIONS), panel="Engine")
def rerank(
    query: Annotated[str, typer.Argument(help="What is searched for.")],
    files: Annotated[list[str], _FILES],
    model: Annotated[str | None, _MODEL] = None,
    top_n: Annotated[int | None, typer.Option(min=1, help="Show only the best.", show_default="all")] = None,
    truncate: Annotated[bool, _TRUNCATE] = True,
    max_tokens_per_doc: Annotated[
        int | None, typer.Option(min=1, help="Cut documents to this many tokens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **engine: Any,
) -> None:
    """Order documents by how well they answer a query, the best first."""
    documents = _read_documents(files)
    llm = _load(model, "reranker", engine, show=not as_json)
    found = llm.rerank(
        query,
        [document.text for document in documents],
        top_n,
        use_tqdm=not as_json,
        truncate=truncate,
        max_tokens_per_doc=max_tokens_per_doc,
    )
    if as_json:
        _print_json(query, found, documents)
    else:
        _print_table(found, documents, llm.max_model_len if truncate else None)


@with_flags((ENGINE_OPTIONS[name] for name in POOLING_OPTIONS), panel="Engine")
def embed(
    texts: Annotated[list[str], _TEXTS],
    model: Annotated[str | None, _MODEL] = None,
    prompt_name: Annotated[
        str | None, typer.Option(help="One of the model's own prompts, to put before each text.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="Fewer dimensions, of models that were trained for it.")
    ] = None,
    truncate: Annotated[bool, _TRUNCATE] = False,
    **engine: Any,
) -> None:
    """Print the embeddings of texts, one JSON object per line."""
    given = [line.text for line in _lines(STDIN)] if texts == [STDIN] else texts
    llm = _load(model, "embedder", engine, show=True)
    outputs = llm.embed(given, prompt_name=prompt_name, dimensions=dimensions, truncate=truncate)
    for index, (text, output) in enumerate(zip(given, outputs, strict=True)):
        line = {
            "index": index,
            "text": text,
            "num_tokens": len(output.prompt_token_ids),
            "embedding": output.outputs.embedding,
        }
        print(json.dumps(line, ensure_ascii=False))


def _load(
    model: str | None, kind: Literal["reranker", "embedder"], engine: dict[str, Any], show: bool
) -> LLM:
    with interrupts_end_at_once():
        from inflight.entrypoints.llm import LLM  # torch is loaded only now
        from inflight.models.builtin import builtin_folder

    return LLM(builtin_folder(kind) if model is None else model, show_progress=show, **engine)


# ---- documents ----


@dataclass(frozen=True, slots=True)
class NamedDocument:
    name: str  # where it was found
    text: str


def _read_documents(files: list[str]) -> list[NamedDocument]:
    if len(files) == 1:
        return _lines(files[0])
    return [NamedDocument(file, _read(file)) for file in files]


def _lines(file: str) -> list[NamedDocument]:
    """The lines of a file that are not empty, by their numbers."""
    lines = enumerate(_read(file).splitlines(), 1)
    found = [NamedDocument(f"{file}:{number}", line) for number, line in lines if line.strip()]
    if not found:
        raise PromptError(f"{file!r} has no lines with text: nothing to do")
    return found


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == STDIN else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the file {file!r} cannot be read: {error}") from error


# ---- output ----


def _print_json(query: str, found: list[RerankResult], documents: list[NamedDocument]) -> None:
    results = [
        {
            "index": item.index,
            "relevance_score": item.relevance_score,
            "name": documents[item.index].name,
            "document": item.document,
        }
        for item in found
    ]
    scale = found[0].scale
    print(json.dumps({"query": query, "scale": scale, "results": results}, ensure_ascii=False))


def _print_table(found: list[RerankResult], documents: list[NamedDocument], cut_at: int | None) -> None:
    """A line for each document, as wide as the terminal."""
    console = Console()
    names = [documents[item.index].name for item in found]
    name_width = min(max(map(cell_len, ("document", *names))), console.width // 3)
    heading = f"score ({found[0].scale})"

    def line(rank: object, score: str, name: str, words: str) -> str:
        figures = f"{rank:>4}  {score:>{len(heading)}}  {_fit(name, name_width)}  "
        return figures + _fit(words, console.width - cell_len(figures)).rstrip()

    typer.secho(line("rank", heading, "document", "begins"), dim=True)
    for rank, (item, name) in enumerate(zip(found, names, strict=True), 1):
        beginning = item.document[:FIRST_CHARACTERS]
        words = " ".join("".join(c if c.isprintable() else " " for c in beginning).split())
        print(line(rank, f"{item.relevance_score:.4f}", name, words))
    if cut_at is not None:
        note = f"of a query and a document, up to {cut_at} tokens were read"
        Console(stderr=True).print(note, style="dim", highlight=False)


def _fit(text: str, width: int) -> str:
    """So many columns of the terminal, with blanks, or with an ellipsis in place of what is too much."""
    fits = cell_len(text) <= width
    return set_cell_size(text, width) if fits else f"{set_cell_size(text, max(width - 1, 0))}…"
