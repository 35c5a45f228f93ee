"""Faults and bad input that a server meets, each with a neighbour whose tokens must not change.

Tests are of this folder, or of the file that is named with them.

| fault | tests |
| --- | --- |
| the engine process dies | test_an_engine_that_is_killed; engine/test_process.py |
| the loop hangs while /health stays 200 | test_a_step_that_hangs, test_a_process_that_falls_silent |
| KV memory runs out | test_kv_memory_that_runs_out |
| the client goes away | test_a_client_that_goes_away, test_aborts_take_effect_with_the_next_step; server/test_life.py |
| a client reads slowly | test_a_client_that_does_not_read; server/test_life.py, engine/test_process.py |
| overload | test_overload; server/test_limits.py, server/openai/test_openai.py (Retry-After) |
| SIGTERM | server/test_life.py, server/test_command.py |
| a step raises | test_a_step_that_raises; server/test_life.py |

| input | tests |
| --- | --- |
| pickle over a socket | test_nothing_can_unpickle; engine/test_wire.py, engine/test_process.py (malformed frames) |
| unsafe weights, code in a model folder | test_code_in_a_model_folder_is_not_run; models/test_checkpoint.py |
| chat template | text/test_chat.py (hostile templates, arguments), server/test_bad_input.py (none from requests) |
| numbers, token ids, prompts, stop strings | test_large_lists_stall_no_one; server/test_bad_input.py |
| special tokens in user content | server/openai/test_chat.py, text/test_conversation.py |
| prefix cache | test_hashes_are_no_hashes_of_python; server/test_keys.py (prefixes), e2e/test_bad_input.py (salts) |
| request ids, auth | server/test_keys.py |
| body, headers | server/test_limits.py |
| errors | server/test_bad_input.py, and every test here: no path, address or trace in what a client reads |
"""
