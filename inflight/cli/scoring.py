"""`inflight embed` and `inflight rerank`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_type_hints

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console

from inflight.cli import interrupts_end_at_once
from inflight.cli.command import STDIN, read_text
from inflight.cli.option_sources import with_flags
from inflight.config import ENGINE_OPTIONS
from inflight.errors import PromptError
from inflight.option import Option, option_type
from inflight.outputs import RerankResult
from inflight.scoring import EmbedParams, Scale, ScoreParams, parameter_help

if TYPE_CHECKING:
    from inflight.entrypoints.llm import LLM

# The engine's options that these commands have flags for.
ENGINE_FLAGS = ("device", "dtype", "load_format", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
FIRST_CHARACTERS = 400  # of a document; the table shows as many as fit

_MODEL = typer.Option("--model", "-m", help="A folder or a hub id.", show_default="the built-in model")
_FILES = typer.Argument(
    help="Documents, one per file; with a single file, or - (standard input), one per line."
)
_TEXTS = typer.Argument(help="Texts; - is standard input, one text per line.")


def _flags(params: type, truncate: bool) -> list[Option]:
    """Return a flag for each parameter of a task, then flags for the engine's options."""
    descriptions, types = parameter_help(params), get_type_hints(params)
    defaults, choices = {"truncate": truncate}, {"scale": get_args(Scale)}
    task_options = [
        Option(
            name,
            *option_type(types[name]),
            default=defaults.get(name),
            panel="Task",
            help=description,
            choices=choices.get(name, ()),
        )
        for name, description in descriptions.items()
    ]
    return task_options + [replace(ENGINE_OPTIONS[name], panel="Engine") for name in ENGINE_FLAGS]


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the parameters of a task from the engine's options."""
    engine = {name: value for name, value in options.items() if name in ENGINE_FLAGS}
    return {name: value for name, value in options.items() if name not in ENGINE_FLAGS}, engine


@with_flags(_flags(ScoreParams, truncate=True))
def rerank(
    query: Annotated[str, typer.Argument(help="The query.")],
    files: Annotated[list[str], _FILES],
    model: Annotated[str | None, _MODEL] = None,
    top_n: Annotated[int | None, typer.Option(min=1, help="Show only the best.", show_default="all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **options: Any,
) -> None:
    """Sort documents by how well they answer a query, the best first."""
    documents = _read_documents(files)
    params, engine = _split({"truncate": True, **options})
    llm = _load(model, "reranker", engine, show=not as_json)
    texts = [document.text for document in documents]
    results = llm.rerank(query, texts, top_n, use_tqdm=not as_json, **cast(ScoreParams, params))
    if as_json:
        _print_json(query, results, documents)
    else:
        _print_table(results, documents, llm.max_model_len if params["truncate"] else None)


@with_flags(_flags(EmbedParams, truncate=False))
def embed(
    texts: Annotated[list[str], _TEXTS], model: Annotated[str | None, _MODEL] = None, **options: Any
) -> None:
    """Print the embeddings of texts, one JSON object per line."""
    texts = [line.text for line in _lines(STDIN)] if texts == [STDIN] else texts
    params, engine = _split(options)
    llm = _load(model, "embedder", engine, show=True)
    outputs = llm.embed(texts, **cast(EmbedParams, params))
    for index, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        line = {
            "index": index,
            "text": text,
            "num_tokens": len(output.prompt_token_ids),
            "embedding": output.outputs.embedding,
        }
        print(json.dumps(line, ensure_ascii=False))


def _load(
    model: str | None, role: Literal["reranker", "embedder"], engine: dict[str, Any], show: bool
) -> LLM:
    with interrupts_end_at_once():
        from inflight.checkpoint.builtin import builtin_folder
        from inflight.entrypoints.llm import LLM  # imports torch, which is slow

    return LLM(builtin_folder(role) if model is None else model, show_progress=show, **engine)


# ---- documents ----


@dataclass(frozen=True, slots=True)
class NamedDocument:
    name: str  # file, or file and line
    text: str


def _read_documents(files: list[str]) -> list[NamedDocument]:
    if len(files) == 1:
        return _lines(files[0])
    return [NamedDocument(file, read_text(file)) for file in files]


def _lines(file: str) -> list[NamedDocument]:
    """Return the lines of a file that are not empty, named by their numbers."""
    lines = enumerate(read_text(file).splitlines(), 1)
    documents = [NamedDocument(f"{file}:{number}", line) for number, line in lines if line.strip()]
    if not documents:
        raise PromptError(f"{file!r} has no lines with text")
    return documents


# ---- output ----


def _print_json(query: str, ranking: list[RerankResult], documents: list[NamedDocument]) -> None:
    results = [
        {
            "index": item.index,
            "relevance_score": item.relevance_score,
            "name": documents[item.index].name,
            "document": item.document,
        }
        for item in ranking
    ]
    scale = ranking[0].scale
    print(json.dumps({"query": query, "scale": scale, "results": results}, ensure_ascii=False))


def _print_table(ranking: list[RerankResult], documents: list[NamedDocument], cut_at: int | None) -> None:
    """Print a line for each document, as wide as the terminal."""
    console = Console()
    names = [documents[item.index].name for item in ranking]
    name_width = min(max(map(cell_len, ("document", *names))), console.width // 3)
    heading = f"score ({ranking[0].scale})"

    def line(rank: object, score: str, name: str, words: str) -> str:
        figures = f"{rank:>4}  {score:>{len(heading)}}  {_fit(name, name_width)}  "
        return figures + _fit(words, console.width - cell_len(figures)).rstrip()

    typer.secho(line("rank", heading, "document", "begins"), dim=True)
    for rank, (item, name) in enumerate(zip(ranking, names, strict=True), 1):
        beginning = item.document[:FIRST_CHARACTERS]
        words = " ".join("".join(c if c.isprintable() else " " for c in beginning).split())
        print(line(rank, f"{item.relevance_score:.4f}", name, words))
    if cut_at is not None:
        note = f"up to {cut_at} tokens of a query and a document were read"
        Console(stderr=True).print(note, style="dim", highlight=False)


def _fit(text: str, width: int) -> str:
    """Return text of exactly `width` terminal columns: padded, or cut with an ellipsis."""
    fits = cell_len(text) <= width
    return set_cell_size(text, width) if fits else f"{set_cell_size(text, max(width - 1, 0))}…"
