"""The startup banner: what is served, how much fits, the base URL of each API, and commands to try."""

from __future__ import annotations

import logging
import sys
from typing import Any

from inflight import __version__
from inflight.engine.client import ModelFacts
from inflight.scoring import Task
from inflight.server.state import ServerState

logger = logging.getLogger(__name__)


def announce(state: ServerState, sockname: Any) -> None:
    """Print the startup banner to standard error, as one log record if logs are JSON.

    `sockname` is the address that the server listens on.
    """
    text = _banner(state, sockname)
    if state.options.process.log_format == "json":
        logger.info("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)


def _banner(state: ServerState, sockname: Any) -> str:
    facts, options = state.model.client.facts, state.options
    url = _base_url(state, sockname)
    rows = [
        ("Model", f"{', '.join(state.model.names)} ({facts.dtype}, context length {facts.max_model_len:,})"),
        ("Tasks", ", ".join(state.model.tasks)),
        ("Device", f"{facts.device}, {_engines(state)}"),
        *_capacity(facts),
        ("Scheduling", f"policy {options.policy}, at most {options.max_queue:,} requests waiting"),
        *([("API workers", f"{options.api_workers} processes")] if options.api_workers > 1 else []),
        ("API keys", "required" if state.keys.required else "not required"),
        ("OpenAI API", f"{url}/v1"),
        *([("Anthropic API", url), ("Chat page", f"{url}/")] if facts.generates else []),
        ("Timeline", f"{url}/timeline"),
        ("Other pages", ", ".join(f"{url}{path}" for path in ("/requests", "/memory", "/replicas", "/docs"))),
        ("Metrics", f"{url}/metrics"),
        ("Health", f"{url}/health"),
    ]
    lines = [f"inflight {__version__}", *(f"  {name:<13}  {text}" for name, text in rows), "", "  Try it:"]
    key = " -H 'Authorization: Bearer KEY'" if state.keys.required else ""
    for route, body in (example for task, example in _EXAMPLES if task in state.model.tasks):
        lines.append(f"    curl -N {url}{route}{key} -H 'Content-Type: application/json' -d '{body}'")
    return "\n".join([*lines, ""])


def _base_url(state: ServerState, sockname: Any) -> str:
    """Return the URL under which a client on this machine reaches the server."""
    host, port = sockname[0], sockname[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if state.options.ssl_certfile else 'http'}://{name}:{port}"


def _engines(state: ServerState) -> str:
    if state.model.replicas is None:
        return f"engine in {'this process' if state.options.in_process else 'its own process'}"
    router = state.options.router
    cluster = "" if router.ray_address is None else " on a Ray cluster"
    return f"{len(state.model.replicas.members)} replicas{cluster}, routing {router.routing}"


def _capacity(facts: ModelFacts) -> list[tuple[str, str]]:
    """Return what fits at once: into the KV cache or, for an encoder, which has none, into a step."""
    if facts.pooling is not None and not facts.pooling.splittable:
        tokens, texts = facts.max_num_batched_tokens, facts.max_num_seqs
        return [("Batch", f"at most {tokens:,} tokens of {texts:,} texts per step")]
    num_tokens = facts.num_blocks * facts.block_size
    return [
        ("KV cache", f"{facts.num_blocks:,} blocks of {facts.block_size} tokens = {num_tokens:,} tokens"),
        (
            "Batch",
            f"at most {facts.max_num_seqs:,} requests, {facts.num_full_requests:,} of full context length",
        ),
    ]


_EXAMPLES: tuple[tuple[Task, tuple[str, str]], ...] = (
    (
        "generate",
        (
            "/v1/chat/completions",
            '{"messages": [{"role": "user", "content": "Why does it rain?"}], "stream": true}',
        ),
    ),
    ("generate", ("/v1/completions", '{"prompt": "Once upon a time", "max_tokens": 64}')),
    ("embed", ("/v1/embeddings", '{"input": "Why does it rain?"}')),
    ("classify", ("/classify", '{"input": "Why does it rain?"}')),
    ("rerank", ("/rerank", '{"query": "Why does it rain?", "documents": ["Water falls.", "A fox sleeps."]}')),
)
