"""What is said at the start: what runs, how much fits, where to look, what to try."""

from __future__ import annotations

from typing import Any

from inflight import __version__
from inflight.engine import ModelFacts
from inflight.scoring import Task
from inflight.server.state import ServerState


def address_of(state: ServerState, sockname: Any) -> str:
    """Where a browser on this machine finds the server."""
    host, port = sockname[0], sockname[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if state.options.ssl_certfile else 'http'}://{shown}:{port}"


def summary(state: ServerState, sockname: Any) -> str:
    facts, options = state.client.facts, state.options
    url = address_of(state, sockname)
    key = " -H 'Authorization: Bearer KEY'" if state.keys.required else ""
    rows = (
        ("model", f"{', '.join(state.names)} ({facts.dtype}, context {facts.max_model_len:,})"),
        (
            "device",
            f"{facts.device}, {_engines(state)}",
        ),
        *_room(facts),
        *([("front", f"{options.api_workers} processes")] if options.api_workers > 1 else []),
        ("policy", f"{options.policy}, queue of {options.max_queue:,}"),
        ("keys", "needed" if state.keys.required else "not needed"),
        ("can", ", ".join(state.tasks)),
        (
            "look",
            ", ".join([*([f"{url}/ to chat"] if facts.generates else []), f"{url}/metrics", f"{url}/health"]),
        ),
    )
    lines = [f"inflight {__version__}", *(f"  {name:<10} {text}" for name, text in rows), "", "  try"]
    for route, body in (example for task, example in _EXAMPLES if task in state.tasks):
        lines.append(f"    curl -N {url}{route}{key} -H 'Content-Type: application/json' -d '{body}'")
    return "\n".join([*lines, ""])


def _engines(state: ServerState) -> str:
    if state.replicas is None:
        return f"engine in {'this process' if state.options.in_process else 'its own process'}"
    router = state.options.router
    place = "" if router.ray_address is None else " on a Ray cluster"
    return f"{len(state.replicas.members)} replicas{place}, routing {router.routing}"


def _room(facts: ModelFacts) -> list[tuple[str, str]]:
    """What fits at once: into the KV memory or, of an encoder, which keeps none, into a step."""
    if facts.pooling is not None and not facts.pooling.splittable:
        return [
            (
                "fits",
                f"{facts.max_num_batched_tokens:,} tokens of up to {facts.max_num_seqs:,} texts per step",
            )
        ]
    num_tokens = facts.num_blocks * facts.block_size
    fits = facts.num_full_requests
    return [
        ("KV memory", f"{facts.num_blocks:,} blocks of {facts.block_size} = {num_tokens:,} tokens"),
        ("fits", f"{fits:,} requests of full length at once, {facts.max_num_seqs:,} at most"),
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
    (
        "rerank",
        ("/rerank", '{"query": "Why does it rain?", "documents": ["Water falls.", "A fox sleeps."]}'),
    ),
)
