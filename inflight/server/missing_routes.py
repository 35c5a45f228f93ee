"""Paths that clients look for and that are not here: what to say about them."""

from __future__ import annotations

_TEXT_ONLY = "only text is read and written"
_NO_LORA = "there are no adapters yet: merge it into a checkpoint"
_NO_PROFILER = "/v1/requests/{id} says where a request's time went, and /metrics what the engine does"
_NO_RPC = "there are no workers that run code of callers"

# By clients whose base URL lacks /v1.
_FORGOTTEN = ("/chat/completions", "/completions", "/messages", "/responses", "/embeddings", "/models")

MISSING_ROUTES: dict[str, str] = {
    "/pooling": "use /v1/embeddings, /score or /classify",
    "/v1/audio/transcriptions": _TEXT_ONLY,
    "/v1/audio/translations": _TEXT_ONLY,
    "/v1/audio/speech": _TEXT_ONLY,
    "/v1/images/generations": _TEXT_ONLY,
    "/v1/realtime": _TEXT_ONLY,
    "/v1/load_lora_adapter": _NO_LORA,
    "/v1/unload_lora_adapter": _NO_LORA,
    "/start_profile": _NO_PROFILER,
    "/stop_profile": _NO_PROFILER,
    "/collective_rpc": _NO_RPC,
    "/invocations": "use the route of what is asked for, as /v1/chat/completions",
    "/inference/v1/generate": "use /v1/completions with token ids and return_token_ids",
    "/tokenizer_info": "the tokenizer's files are the checkpoint's; /tokenize and /detokenize are here",
    "/scale_elastic_ep": "use /v1/replicas",
    "/is_scaling_elastic_ep": "use /v1/replicas",
    "/reset_mm_cache": _TEXT_ONLY,
    "/reset_encoder_cache": _TEXT_ONLY,
    "/pause": "use /v1/replicas/{id}/drain, or /sleep when no request is left",
    "/resume": "use /v1/replicas, or /wake_up",
    "/v1/files": "nothing is kept here; send what is to be read",
    "/v1/batches": "send the requests themselves: the queue takes --max-queue of them",
    "/v1/assistants": "use /v1/responses",
    "/v1/threads": "use /v1/responses with previous_response_id",
    "/v1/moderations": "no one looks at what is written here",
    "/redoc": "use /docs",
    "/generate": "use /v1/completions",
    "/v1/engines": "use /v1/models",
    "/v1": "routes begin with it, as /v1/models does; it is the base URL of OpenAI's clients",
}


def hint_for(path: str) -> str:
    """What follows the words that there is nothing at this path."""
    if path in _FORGOTTEN:
        return f": it is at /v1{path}"
    known = MISSING_ROUTES.get(path.rstrip("/"))
    if known is None and path.endswith("/"):
        return ": try it without the slash at its end"
    return "" if known is None else f": {known}"
