"""Commands of `vllm` that are none here, and what to type instead. docs/from-vllm.md is the same for people."""

_OFFLINE = "`inflight compare` runs a workload on this machine, and `inflight bench serve` measures a server"

COMMANDS = {
    "chat": "`inflight generate --chat -p TEXT` answers a message, and `inflight serve` has a page to chat with",
    "complete": "`inflight generate -p TEXT` completes it",
    "run-batch": "`inflight generate --prompts-file FILE --json` answers the prompts of a file, one per line",
    "collect-env": "`inflight --version` and a server's /server_info say what runs",
    "launch": "`inflight serve` starts all of a server, and `inflight replicas add` more engines for it",
    "bench latency": _OFFLINE,
    "bench throughput": _OFFLINE,
    "bench sweep": "`inflight bench serve --rate 1 2 4` measures one rate after the other",
    "bench mm-processor": "models read and write text only, no images, audio or video yet",
}
