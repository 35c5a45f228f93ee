"""The `inflight` command and its subcommands."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from inflight import __version__
from inflight.cli import interrupts_end_at_once
from inflight.cli.bench import app as bench_app
from inflight.cli.command import Command, InflightCommand, InflightGroup, read_text
from inflight.cli.compare import CompareCommand, compare
from inflight.cli.evaluate import evaluate, quantize
from inflight.cli.option_sources import argument, with_flags
from inflight.cli.plan import plan
from inflight.cli.replicas import app as replicas_app
from inflight.cli.scoring import embed, rerank
from inflight.cli.serve import ServeCommand, serve
from inflight.cli.timeline import top, trace
from inflight.config import ENGINE_OPTIONS
from inflight.errors import EngineError, InflightError
from inflight.outputs import RequestOutput

app = typer.Typer(
    cls=InflightGroup,
    help="An LLM serving engine whose unit of scheduling is one token, not one request.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(show: bool) -> None:
    if show:
        print(f"inflight {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-v", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


def _sampling(text: str, *names: str) -> Any:
    return typer.Option(*names, rich_help_panel="Sampling", help=text)


# The engine's options that `generate` has flags for.
GENERATE_OPTIONS = (
    *("device", "chat_template", "dtype", "load_format", "policy"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_kv_tokens", "kv_cache_memory"),
    *("kv_cache_dtype", "kv_cache_dtype_skip_layers", "gpu_memory_utilization", "enable_prefix_caching"),
    *("enforce_eager", "speculative_config"),
)
_PROMPTS_FILE = typer.Option(help="A file with one prompt per line; - is standard input.")
_MAX_TOKENS = _sampling(
    "Maximum length of an answer; by default the checkpoint's limit, or the context length."
)
_TEMPERATURE = _sampling("Sampling temperature; 0 is greedy. Sampling defaults come from the checkpoint.")
_TOP_P = _sampling("Sample from the most likely tokens with this total probability.")
_MIN_P = _sampling("Sample from tokens at least this likely, relative to the most likely one.")
_PENALTY = _sampling("Values above 1 make repeated tokens less likely.")
_STOP = _sampling("Stop before this text; may be repeated.")
_LOGPROBS = _sampling("Report this many of the most likely tokens at each position (with --json).")


@app.command(cls=InflightCommand)
@with_flags((ENGINE_OPTIONS[name] for name in GENERATE_OPTIONS), panel="Engine")
def generate(
    model: Annotated[str | None, argument(ENGINE_OPTIONS["model"])] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")
    ] = None,
    prompts_file: Annotated[Path | None, _PROMPTS_FILE] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user message.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt, one per line.")
    ] = False,
    max_tokens: Annotated[int | None, _MAX_TOKENS] = None,
    temperature: Annotated[float | None, _TEMPERATURE] = None,
    top_p: Annotated[float | None, _TOP_P] = None,
    top_k: Annotated[int | None, _sampling("Sample from this many of the most likely tokens.")] = None,
    min_p: Annotated[float | None, _MIN_P] = None,
    repetition_penalty: Annotated[float | None, _PENALTY] = None,
    seed: Annotated[int | None, _sampling("Seed; the same seed gives the same answer.")] = None,
    n: Annotated[int | None, _sampling("Number of answers per prompt.", "-n")] = None,
    stop: Annotated[list[str] | None, _STOP] = None,
    logprobs: Annotated[int | None, _LOGPROBS] = None,
    ignore_eos: Annotated[bool, _sampling("Do not stop at the end-of-text token.", "--ignore-eos")] = False,
    **engine: Any,
) -> None:
    """Answer prompts with a model and print the answers."""
    prompts = _read_prompts(prompt, prompts_file)
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "n": n,
        "stop": stop or None,
        "logprobs": logprobs,
        "ignore_eos": ignore_eos or None,
    }
    outputs = _answer(model, engine, prompts, chat, {k: v for k, v in sampling.items() if v is not None})
    for text, output in zip(prompts, outputs, strict=True):
        _print_json(text, output) if as_json else _print_text(text, output, several=len(prompts) > 1)
    failed = [answer.error for output in outputs for answer in output.outputs if answer.error]
    if failed:
        raise EngineError(f"{len(failed)} answers failed; the first with: {failed[0]}")


def _answer(
    model: str | None, engine: dict[str, Any], prompts: list[str], chat: bool, sampling: dict[str, Any]
) -> list[RequestOutput]:
    with interrupts_end_at_once():
        from inflight import LLM, SamplingParams  # imports torch

    llm = LLM(model, **engine)
    # Defaults come from the checkpoint. Without a limit there, answers may be as long as the context.
    params = SamplingParams(**{"max_tokens": None, **llm.get_default_sampling_fields(), **sampling})
    if chat:
        return llm.chat([[{"role": "user", "content": text}] for text in prompts], params)
    return llm.generate(prompts, params)


for command in (embed, rerank, plan, quantize):
    app.command(cls=InflightCommand)(command)
app.command("eval", cls=InflightCommand)(evaluate)
app.command(cls=CompareCommand)(compare)
app.command(cls=ServeCommand)(serve)
app.add_typer(bench_app, name="bench")
app.add_typer(replicas_app, name="replicas")
app.command(cls=Command)(top)
app.command(cls=Command)(trace)


def _read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    texts = list(prompts or ())
    if file is not None:
        texts += [line for line in read_text(str(file)).splitlines() if line.strip()]
    if not texts:
        raise typer.BadParameter("no prompt: give -p TEXT, or --prompts-file FILE")
    return texts


def _print_json(prompt: str, output: RequestOutput) -> None:
    answers = [
        {
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "error": answer.error,
            "logprobs": None
            if answer.logprobs is None
            else [
                {str(i): asdict(logprob) for i, logprob in position.items()} for position in answer.logprobs
            ],
        }
        for answer in output.outputs
    ]
    metrics = output.metrics
    print(
        json.dumps(
            {
                "prompt": prompt,
                "outputs": answers,
                "num_prompt_tokens": len(output.prompt_token_ids),
                "num_cached_tokens": output.num_cached_tokens,
                "seconds": {
                    "queue": metrics.time_in_queue,
                    "first_token": metrics.time_to_first_token,
                    "total": metrics.latency,
                },
                "num_preemptions": metrics.num_preemptions,
            },
            ensure_ascii=False,
        )
    )


def _print_text(prompt: str, output: RequestOutput, several: bool) -> None:
    """Print answers unchanged: rich would replace codes like :smile:."""
    for answer in output.outputs:
        if several or len(output.outputs) > 1:
            typer.secho(f"── {prompt}", dim=True)
        print(answer.text)


def main() -> None:
    """Run the command line. Expected errors are printed as one line, without a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        app()
    except InflightError as error:
        print(f"inflight: {' '.join([str(error), *getattr(error, '__notes__', ())])}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("inflight: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
