"""Names of /metrics: those of the engine (EngineStats), under which they stand there, and what each says. Gateways,
autoscalers and dashboards look for vLLM's names of the same facts."""

from __future__ import annotations

from collections.abc import Mapping

# The engine's names (EngineStats) and vLLM's names for the same facts, with what is said about them.
COUNTERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "prompt_tokens": (("vllm:prompt_tokens", "vllm:prefix_cache_queries"), "Prompt tokens of admitted requests"),
    "generated_tokens": (("vllm:generation_tokens",), "Tokens generated and delivered"),
    "cached_tokens": (("vllm:prefix_cache_hits",), "Prompt tokens whose KV was found in the prefix cache"),
    "retractions": (("vllm:num_preemptions",), "Running choices put back to make room"),
    "drafted": (("vllm:spec_decode_num_draft_tokens",), "Draft tokens verified"),
    "accepted": (("vllm:spec_decode_num_accepted_tokens",), "Draft tokens accepted"),
    "recomputed_tokens": ((), "Tokens of sessions and retracted choices whose KV had gone and was computed again"),
    "host_saved_tokens": ((), "Tokens whose KV was copied to host memory when it left the device"),
    "host_restored_tokens": (("vllm:external_prefix_cache_hits",), "Tokens whose KV was copied back, not computed"),
    "host_declined_tokens": ((), "Tokens that host memory held and that were computed, since that took less time"),
    "host_forgotten_tokens": ((), "Tokens whose copy in host memory made room for others, or was flushed"),
    "requests": ((), "Requests that the engine took, however many choices each has"),
    "turns": ((), "Choices that ended, in whatever way"),
    "steps": ((), "Steps that were planned"),
    "mixed_steps": ((), "Steps with both a prompt's chunk and a row that generates"),
    "chunk_rows": ((), "Chunks of prompts that were planned"),
    "chunk_tokens": ((), "Tokens of those chunks, at most"),
    "decode_rows": ((), "Rows that generate, as planned"),
    "tail_rows": ((), "Rows that generate in mixed steps, as planned"),
    "tail_tokens": ((), "Tokens of those rows, at most"),
    "planned_tokens": ((), "Tokens of steps, at most, as planned"),
    "fed_tokens": ((), "Tokens that steps fed to the model"),
    "prefill_tokens": ((), "Tokens fed of prompts, and of choices that came back"),
    "decode_tokens": ((), "Tokens fed by rows that generate without drafts"),
    "verify_tokens": ((), "Tokens fed by rows with drafts: the last one and its drafts"),
    "prefill_rows": ((), "Rows of steps that fed a prompt"),
    "plain_rows": ((), "Rows of steps that generated without drafts"),
    "verify_rows": ((), "Rows of steps that verified drafts"),
    "reclaimed": ((), "Idle sessions and waiting turns whose KV memory was taken for others"),
    "stale_results": ((), "Rows of results whose choice had ended before"),
    "host_stops": ((), "Choices that a stop string ended"),
    "aborts": ((), "Choices that were withdrawn"),
    "masked_steps": ((), "Steps with a row that a grammar binds"),
    "masked_positions": ((), "Positions that a grammar's mask was needed for"),
    "masks_reused": ((), "Of them, those whose mask had been made for another position"),
    "grammar_ends": ((), "Choices that their grammar ended"),
    "grammar_errors": ((), "Choices whose grammar could not be compiled, or led into a dead end"),
    "grammars_crowded": ((), "Requests whose grammar waited too long for others that take long to compile"),
    "processor_steps": ((), "Steps with a row that has logit processors of its own"),
    "processor_errors": ((), "Choices that such a processor failed"),
    "forks": ((), "Further choices of a prompt (n, best_of)"),
    "forks_without_pages": ((), "Further choices that did not get the KV of their prompt"),
    "host_drafts": ((), "Rows for which the host proposed drafts"),
    "forced_drafts": ((), "Rows for which a grammar forced what follows"),
    "pool_bound": ((), "Choices that ended because the KV cache holds no more of them"),
    "session_turns": ((), "Turns of sessions"),
    "in_place_turns": ((), "Turns of sessions that went on in the slot of the turn before"),
    "branches": ((), "Sessions that were made from another one"),
    "sessions_opened": ((), "Sessions that were opened"),
    "sessions_closed": ((), "Sessions that were closed, for whatever reason"),
    "sessions_expired": ((), "Sessions that were idle for too long"),
    "sessions_displaced": ((), "Idle sessions that made room for a new one"),
    "sessions_busy": ((), "Turns refused because their session was busy"),
    "turns_beside": ((), "Turns that ran without their session, which was busy"),
    "turns_rolled_back": ((), "Turns that left no trace in their session"),
    "turns_kept": ((), "Aborted turns whose answer so far stays in their session"),
    "faults": ((), "Requests that a failed check ended; should be 0"),
    "broken_books": ((), "Steps after which the pages did not add up; should be 0"),
    "loop_seconds": ((), "Seconds of the engine's loop in which it had work"),
    "device_wait_seconds": ((), "Seconds of them in which it waited for the device"),
    "mask_seconds": ((), "Seconds in which grammars' masks were made"),
    "late_masks": ((), "Masks of grammars that followed their step's plan"),
    "late_masks_overlapped": ((), "Late masks that were made while another step ran"),
    "graph_replays": ((), "Steps that replayed a CUDA graph"),
    "eager_steps": ((), "Steps without a CUDA graph on a device that has them"),
    "engine_restarts": ((), "Engines that died and were started again; should be 0"),
    "drafter_faults": ((), "Times that a third party's drafter failed and a step or a row went without drafts"),
    "elastic_predicted_seconds": ((), "What the cost model said that steps would take"),
    "elastic_measured_seconds": ((), "What those steps took; on a CPU without a goal for latency, their work"),
    "elastic_plain_seconds": ((), "What the same tokens would have taken without drafts, by the cost model"),
    "elastic_regret_seconds": ((), "Seconds of steps that drafts made longer than they were worth"),
    "elastic_probes": ((), "Steps that tried whether drafts have become worth it, or what a size of step costs"),
    "elastic_absent_drafts": ((), "Drafts that rows might have verified, and for which steps had no room made"),
}
GAUGES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "running": (("vllm:num_requests_running",), "Choices in the batch"),
    "waiting": (("vllm:num_requests_waiting",), "Choices waiting for a place in the batch"),
    "host_bytes_used": ((), "Bytes of host memory that hold copies of KV"),
    "host_bytes_total": ((), "Bytes of host memory for copies of KV"),
    "host_save_bytes_per_second": ((), "How fast KV is copied to host memory, measured; 0: not yet"),
    "host_restore_bytes_per_second": ((), "How fast KV is copied back, measured; 0: not yet"),
    "prefill_tokens_per_second": ((), "How fast steps feed prompts, measured for the host tier; 0: not yet"),
    "sessions": ((), "Sessions that are open"),
    "session_tokens": ((), "Tokens of their histories"),
    "session_cached_tokens": ((), "Tokens of their histories whose KV is on the device"),
    "steps_in_flight": ((), "Steps that the device has and the host has not heard of"),
    "kv_usage": (("vllm:kv_cache_usage_perc",), "Share of KV pages in use, 0 to 1"),
}
# Engine counters that are one fact with a label: family -> (label, {value: engine's name}, text)
BY_KIND: Mapping[str, tuple[str, Mapping[str, str], str]] = {
    "stretto_step_tokens": ("kind", {"prefill": "prefill_tokens", "decode": "decode_tokens",
                                     "verify": "verify_tokens"}, "Tokens fed to the model, by what their row was for"),
    "stretto_step_rows": ("kind", {"prefill": "prefill_rows", "decode": "plain_rows", "verify": "verify_rows"},
                          "Rows of steps, by what they were for"),
    "vllm:spec_decode_num_drafts": ("", {"": "verify_rows"}, "Drafts verified, each of one or more tokens"),
}
BY_PLACE: Mapping[str, tuple[tuple[str, ...], str, str]] = {  # engine's name before the number: families, label, text
    "drafted_at": (("stretto_drafted_per_position",), "position", "Draft tokens verified, by place in the draft"),
    "accepted_at": (("stretto_accepted_per_position", "vllm:spec_decode_num_accepted_tokens_per_pos"), "position",
                    "Draft tokens accepted, by place in the draft"),
    "elastic_chosen": (("stretto_elastic_rows",), "drafts", "Rows that decode, by the drafts the step gave them"),
}
ACCEPTED_RUNS = ("stretto_accepted_run_tokens", "Draft tokens accepted in a step, of each row with drafts")
KV_PAGES = ("stretto_kv_pages", "Pages of the KV cache, by group of layers and by what they hold")
PAGE_STATES = {"free": "pages_free_", "evictable": "pages_evictable_", "used": "pages_used_"}
"""The engine's names, which the group's number follows."""
TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY = "time_to_first_token_seconds", "inter_token_latency_seconds"
REQUEST_LATENCY, QUEUE_TIME = "e2e_request_latency_seconds", "request_queue_time_seconds"
HISTOGRAMS: Mapping[str, str] = {  # each under our prefix and vLLM's
    TIME_TO_FIRST_TOKEN: "From a request's arrival to its first token",
    INTER_TOKEN_LATENCY: "Between two tokens of a choice; tokens of one step share the step's time",
    REQUEST_LATENCY: "From a request's arrival to its end",
    QUEUE_TIME: "From a request's arrival to its place in the batch",
}
