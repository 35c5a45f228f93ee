"""Faults and bad input, each next to a request of another client whose tokens must not change.

| fault | tests, here or in another folder |
| --- | --- |
| the engine process dies, hangs or falls silent | test_engine.py; engine/remote/test_process_client.py |
| a step raises, or KV memory runs out | test_engine.py; server/test_life.py |
| a client disconnects or reads slowly | test_clients.py; server/test_life.py, engine/remote/test_process_client.py |
| overload | test_clients.py; server/http/test_limits.py, server/openai/test_openai.py (Retry-After) |
| SIGTERM | server/test_life.py, server/test_command.py |

| input | tests, here or in another folder |
| --- | --- |
| pickle over a socket | test_input.py; engine/remote/ (malformed frames) |
| unsafe weights, code in a model folder | test_input.py; checkpoint/test_checkpoint.py |
| chat template | frontend/text/test_chat.py (hostile), server/test_bad_input.py (none from requests) |
| numbers, token ids, prompts, stop strings | test_clients.py; server/test_bad_input.py |
| special tokens in user content | server/openai/test_chat.py, frontend/text/test_conversation.py |
| prefix cache | test_input.py; server/access/test_keys.py (prefixes), e2e/test_bad_input.py (salts) |
| request ids, auth | server/access/test_keys.py |
| body, headers | server/http/test_limits.py |
| errors | server/test_bad_input.py, and every test here: no path, address or trace in what a client reads |
"""
