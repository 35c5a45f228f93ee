"""The routes around generation: models, tokens, metrics, the chat page, the OpenAPI document."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import inflight
from inflight import LLM
from inflight.server.state import SERVICE_THREADS
from tests.server.live import Backend, Live, live_server, stream


def test_model_is_listed(live: Live) -> None:
    (model,) = live.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("inflight-builtin", "model", 4096)
    assert live.http.get("/v1/models/inflight-builtin").json() == model


def test_model_can_have_several_names(backend: Backend) -> None:
    with live_server(backend, served_model_name=("org/model", "short")) as live:
        names = [model["id"] for model in live.http.get("/v1/models").json()["data"]]
        assert names == ["org/model", "short"]
        assert live.http.get("/v1/models/org/model").json()["id"] == "org/model"
        assert live.complete([5], max_tokens=1, model="short")["model"] == "short"
        assert live.complete([5], max_tokens=1)["model"] == "org/model"


def test_path_is_never_a_listed_name() -> None:
    from inflight.checkpoint.builtin import checkpoint_folder
    from inflight.server.state import default_name

    assert default_name(str(checkpoint_folder())) == "checkpoint"
    assert default_name("org/model") == "org/model"


def test_version_health_and_ready_answer(live: Live) -> None:
    assert live.http.get("/version").json() == {"version": inflight.__version__}
    for path in ("/health", "/ready"):
        response = live.http.get(path)
        assert response.status_code == 200
        assert response.json()["status"] == "ok"
        assert response.headers["x-request-id"].startswith("req-")
        bare = live.http.head(path)  # what some load balancers ask with
        assert (bare.status_code, bare.content) == (200, b"")


def test_tokenize_and_detokenize_round_trip(live: Live, llm: LLM) -> None:
    text = "Once upon a time, there was a fox: 12 €!"
    tokens = live.post("/tokenize", {"prompt": text}).json()
    assert tokens["tokens"] == llm.get_tokenizer().encode(text)
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 4096)
    assert live.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    spelled = live.post("/tokenize", {"prompt": "a fox", "return_token_strs": True}).json()
    assert len(spelled["token_strs"]) == spelled["count"]


def test_tokenize_renders_messages(live: Live) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tokens = live.post("/tokenize", {"messages": messages}).json()["tokens"]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    assert live.post("/v1/chat/completions", body).json()["prompt_token_ids"] == tokens


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "either prompt"),
        ("/tokenize", {"prompt": "x", "foo": 1}, "unknown parameter: foo"),
        ("/detokenize", {"tokens": [99999]}, "token id 99999"),
        ("/detokenize", {"tokens": [-1]}, "token id -1"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0] is 'x'"),
        ("/detokenize", {"tokens": [5, True]}, "tokens[1] is True"),
        ("/detokenize", {}, "missing parameter: tokens"),
    ],
)
def test_invalid_tokenize_requests_are_refused(
    path: str, body: dict[str, Any], message: str, live: Live
) -> None:
    response = live.post(path, body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_too_long_texts_are_refused(backend: Backend) -> None:
    message = {"role": "user", "content": "x"}
    hidden = {"role": "assistant", "tool_calls": [{"function": {"arguments": {"y" * 101: 1}}}]}
    numbers = [{"type": "function", "function": {"name": "f", "parameters": {"enum": [5] * 50}}}]
    with live_server(backend, max_tokenize_size=100) as live:
        for path, body, param in (
            ("/tokenize", {"prompt": "x" * 101}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user", "content": "x" * 101}]}, "messages"),
            ("/tokenize", {"messages": [{**message, "name": "x" * 101}]}, "messages"),
            ("/tokenize", {"messages": [message, hidden]}, "messages"),
            ("/tokenize", {"messages": [message], "chat_template_kwargs": {"x": "y" * 101}}, "messages"),
            ("/tokenize", {"messages": [message], "tools": numbers}, "messages"),
            ("/detokenize", {"tokens": [5] * 101}, "tokens"),
        ):
            response = live.post(path, body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("text_too_long", param)
        assert live.post("/tokenize", {"prompt": "x" * 100}).status_code == 200
        assert live.post("/detokenize", {"tokens": [5] * 100}).status_code == 200


def test_chats_do_not_wait_for_tokenize_requests(backend: Backend) -> None:
    with live_server(backend) as live:
        go_on = threading.Event()
        state = live.state
        held = [state.service_threads.submit(go_on.wait) for _ in range(2 * SERVICE_THREADS)]
        try:
            with ThreadPoolExecutor(1) as asking:
                tokenizing = asking.submit(live.post, "/tokenize", {"prompt": "x"})
                chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
                for _ in range(4):
                    assert live.post("/v1/chat/completions", chat).status_code == 200
                assert not tokenizing.done()
                go_on.set()
                assert tokenizing.result().status_code == 200
        finally:
            go_on.set()
        assert all(future.result() for future in held)


def test_chat_page_is_self_contained(live: Live) -> None:
    response = live.http.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page = response.text
    assert "v1/chat/completions" in page
    assert not re.search(r"https?://|//[a-z]+\.|@import|<link|src=", page)


# ---- metrics ----

NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_time_per_output_token_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_success",
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "num_preemptions",
}


def metrics(live: Live) -> dict[str, Any]:
    response = live.http.get("/metrics")
    assert response.status_code == 200
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    for family in families.values():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    raise AssertionError(f"no sample {name} {labels}")


def test_metrics_count_requests_and_tokens(backend: Backend) -> None:
    with live_server(backend, metrics_compat="none") as live:
        before = metrics(live)
        assert {name.removeprefix("inflight:") for name in before} >= NAMES
        assert not any(name.startswith("vllm:") for name in before)
        body = {"prompt": [5, 6, 7], "max_tokens": 10, "ignore_eos": True, "temperature": 0}
        stream(live, "/v1/completions", body)
        live.complete(**body, n=2)
        live.post("/v1/completions", {"foo": 1})
        after = metrics(live)

        def grown(name: str, **labels: str) -> float:
            return value(after, name, **labels) - value(before, name, **labels)

        assert grown("inflight:generation_tokens_total") == 30
        assert grown("inflight:prompt_tokens_total") == 9
        assert grown("inflight:request_generation_tokens_count") == 3
        assert grown("inflight:request_generation_tokens_sum") == 30
        assert grown("inflight:time_to_first_token_seconds_count") == 2
        # Tokens that arrive with an answer's first one have no known time between them.
        assert 0 < grown("inflight:inter_token_latency_seconds_count") <= 27
        assert grown("inflight:e2e_request_latency_seconds_count") == 2
        assert grown("inflight:request_max_num_generation_tokens_count") == 2
        assert grown("inflight:request_max_num_generation_tokens_sum") == 20
        assert grown("inflight:iteration_tokens_total_count") == grown("inflight:steps_total") > 0
        assert grown("inflight:iteration_tokens_total_sum") > 30
        assert value(after, "inflight:cache_config_info", block_size="16", num_gpu_blocks="2048") == 1
        assert value(after, "inflight:request_success_total", finished_reason="length") == 3
        assert value(after, "inflight:requests_refused_total", code="missing_parameter") == 1
        assert value(after, "inflight:http_responses_total", route="/v1/completions", status="200") == 2
        assert value(after, "inflight:http_responses_total", route="/v1/completions", status="400") == 1
        blocks = [value(after, "inflight:kv_blocks", state=state) for state in ("free", "cached", "used")]
        assert sum(blocks) == 2048
        buckets = [
            s for s in after["inflight:inter_token_latency_seconds"].samples if s.name.endswith("_bucket")
        ]
        counts = [sample.value for sample in buckets]
        assert counts == sorted(counts)
        assert buckets[-1].labels["le"] == "+Inf"
        assert counts[-1] == value(after, "inflight:inter_token_latency_seconds_count")


# Under the names that the inference gateway reads by default: TotalQueuedRequests, TotalRunningRequests,
# KVCacheUtilization, and BlockSize and NumGPUBlocks as labels. Then what replaces an older name of vLLM's.
GATEWAY_NAMES = {
    *("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"),
    "inter_token_latency_seconds",
}


def test_metrics_and_fingerprint_tell_a_quantized_kv_cache(backend: Backend) -> None:
    with live_server(backend) as plain, live_server(backend, kv_cache_dtype="int8") as quantized:
        assert value(metrics(quantized), "inflight:cache_config_info", cache_dtype="int8") == 1
        assert plain.state.model.fingerprint != quantized.state.model.fingerprint


@pytest.mark.parametrize(("options", "names"), [({}, GATEWAY_NAMES), ({"metrics_compat": "vllm"}, NAMES)])
def test_metrics_have_vllm_names_too(backend: Backend, options: dict[str, Any], names: set[str]) -> None:
    with live_server(backend, served_model_name=("m",), **options) as live:
        live.complete([5], max_tokens=2)
        families = metrics(live)
        assert value(families, "vllm:cache_config_info", block_size="16", num_gpu_blocks="2048") == 1
        assert {name.removeprefix("vllm:") for name in families if name.startswith("vllm:")} >= names
        assert options or len([name for name in families if name.startswith("vllm:")]) == len(names)
        for name in names:
            for theirs, ours in zip(
                families[f"vllm:{name}"].samples, families[f"inflight:{name}"].samples, strict=True
            ):
                assert theirs.name.removeprefix("vllm:") == ours.name.removeprefix("inflight:")
                assert (theirs.value, theirs.labels) == (ours.value, {**ours.labels, "engine": "0"})
                assert theirs.labels["model_name"] == "m"


# ---- the document ----


def test_openapi_document_has_every_route(live: Live) -> None:
    document = live.http.get("/openapi.json").json()
    assert set(document["paths"]) == {
        *("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}", "/tokenize"),
        *(
            "/load",
            "/server_info",
            "/reset_prefix_cache",
            "/sleep",
            "/wake_up",
            "/is_sleeping",
            "/ping",
        ),
        *("/detokenize", "/version", "/health", "/ready", "/metrics", "/", "/v1/requests/{request_id}"),
        *("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"),
        *("/classify", "/v1/classify", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
        *("/v1/responses/{response_id}/input_items", "/v1/responses/input_tokens"),
        *("/v1/replicas", "/v1/replicas/roll", "/v1/replicas/{replica}"),
        *("/v1/replicas/{replica}/drain", "/v1/replicas/{replica}/restart"),
        *("/v1/steps", "/v1/requests", "/v1/memory", "/v1/trace"),
    }
    text = str(document)
    schemas = document["components"]["schemas"]
    for name in set(re.findall(r"#/components/schemas/(\w+)", text)):
        assert name in schemas
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/CompletionBody"}
    assert schemas["CompletionBody"]["additionalProperties"] is False
    assert "429" in document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert "security" not in document
