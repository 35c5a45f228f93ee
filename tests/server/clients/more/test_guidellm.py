"""The benchmark of guidellm: none of its requests fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.server.clients.more.installed import run_client
from tests.server.live import Live

PROMPTS = (
    "Why does it rain?",
    "Once upon a time",
    "Hello",
    "1 + 1?",
    "And why does it snow?",
    "Who are you?",
)
MAX_TOKENS = 8


def test_benchmark_completes_without_failed_requests(server: Live, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    (tmp_path / "prompts.jsonl").write_text(lines, encoding="utf-8")
    backend = f"kind=openai_http,target={server.url},model=inflight-builtin,api_key=secret"
    options = {
        "--backend": f"{backend},extras.body.max_tokens={MAX_TOKENS}",
        "--profile": "kind=concurrent,streams=3",
        "--constraint": f"kind=max_requests,count={len(PROMPTS)}",
        "--data": "kind=json_file,path=prompts.jsonl",
        "--output": "kind=json,path=found.json",
    }
    words = [word for option in options.items() for word in option]
    alone = {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}
    run_client("guidellm", "-m", "guidellm", "run", *words, "--disable-console", home=tmp_path, **alone)
    report: Any = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    metrics = report["benchmarks"][0]["metrics"]
    total = len(PROMPTS)
    assert metrics["request_totals"] == {"successful": total, "errored": 0, "incomplete": 0, "total": total}
    tokens = metrics["output_token_count"]["successful"]
    assert 1 < tokens["mean"] <= tokens["max"] <= MAX_TOKENS
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0
    server.wait_until_idle()
