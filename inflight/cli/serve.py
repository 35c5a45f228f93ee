"""`inflight serve`."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from inflight.cli import interrupts_end_at_once
from inflight.cli.command import NOTES, InflightCommand, needs_extra
from inflight.cli.option_sources import argument, gather, unused_variables, with_flags
from inflight.cli.vllm_flags import SERVE_RULES
from inflight.server.config import SERVE_OPTIONS, ServerConfig


class ServeCommand(InflightCommand):
    """Logs its notes once logging is configured. Lists are read as by `vllm serve`."""

    logs_notes = False
    greedy_lists = True


_CONFIG = typer.Option(help="A YAML file with options, named like the flags.")


@with_flags(option for name, option in SERVE_OPTIONS.items() if name != "model")
def serve(
    ctx: typer.Context,
    model: Annotated[str | None, argument(SERVE_OPTIONS["model"])] = None,
    config: Annotated[str | None, _CONFIG] = None,
    **flags: Any,
) -> None:
    """Serve a model over HTTP with the APIs of OpenAI and Anthropic.

    Every option can also be set as INFLIGHT_NAME in the environment or in the --config file. Flags take
    precedence over variables, and variables over the file. Flags of `vllm serve` are accepted: docs/from-vllm.md.
    """
    if model is not None:
        flags["model"] = model
    with needs_extra("server"):
        options = ServerConfig.create(**gather(SERVE_OPTIONS, flags, os.environ, config, SERVE_RULES))
        with interrupts_end_at_once():
            if not options.in_process and not options.router.is_enabled:
                # The engine imports torch while this process imports the server.
                from inflight.engine.remote.supervisor import start_spare_engine

                start_spare_engine(options.process.environment)
            from inflight.server.run import run  # imports the server's packages

    run(options, [*ctx.meta[NOTES], *unused_variables(SERVE_OPTIONS, os.environ)])
