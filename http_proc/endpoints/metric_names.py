"""The metrics of the ring: their names and help texts, and the keys of the ring's info."""

PREFIX = "quadriga:"

# Metric name -> (key of the ring's info, help text). Gauges without a key are computed.
GAUGES = {
    "num_requests_running": ("running", "Number of requests that hold a slot of the running batch"),
    "num_requests_waiting": (
        "waiting",
        "Number of requests that wait for a slot, KV pages or a grammar",
    ),
    "num_grammar_queue_reqs": (
        "waiting_for_grammar",
        "Number of waiting requests whose grammar the worker compiles",
    ),
    "num_used_tokens": ("", "Number of tokens that fit into the KV pages that requests hold"),
    "new_token_ratio": (
        "new_token_ratio",
        "Fraction of max_new_tokens for which admission reserves KV pages",
    ),
    "max_total_num_tokens": ("", "Number of tokens that fit into the KV pool"),
    "kv_cache_usage_perc": ("", "Fraction of the KV pages that requests hold, from 0 to 1"),
    "journal_failed": ("", "1 while the journal cannot be written, else 0"),
    "step_gap_p99_ms": (
        "step_gap_ms_p99",
        "Idle time of the worker between two steps, 99th percentile in ms",
    ),
}
COUNTERS = {
    "prompt_tokens": (
        "prompt_tokens_total",
        "Number of prompt tokens of the requests that generated a token",
    ),
    "generation_tokens": ("generation_tokens_total", "Number of generated tokens"),
    "prefix_cache_queries": (
        "prompt_tokens_total",
        "Number of prompt tokens looked up in the prefix cache",
    ),
    "prefix_cache_hits": (
        "cached_tokens_total",
        "Number of prompt tokens found in the prefix cache",
    ),
    "num_preemptions": (
        "retractions",
        "Number of times that a running request was preempted (retracted)",
    ),
    "steps": ("steps", "Number of steps of the worker"),
    "prefill_steps": ("prefill_steps", "Number of steps of the worker that held prompt tokens"),
    "late_plans": (
        "late_plans",
        "Number of steps whose plan arrived after the previous step had ended",
    ),
    "worker_busy_seconds": (
        "busy_seconds",
        "Seconds that the worker spent in forward and sampling",
    ),
}
# Only of a server that guesses tokens.
SPECULATION_COUNTERS = {
    "spec_decode_num_drafts": "Number of rows of steps in which tokens were guessed",
    "spec_decode_num_draft_tokens": "Number of guessed tokens",
    "spec_decode_num_accepted_tokens": "Number of guessed tokens that were right",
}
SPECULATION_BY_PLACE = "spec_decode_num_accepted_tokens_per_pos"
# Only of a server with KV pages beyond the pool: (key of the ring's info, help text).
OFFLOAD_GAUGES = {
    "kv_offload_pages": "Number of KV pages in the tiers beyond the pool, or on their way there",
    "kv_offload_disk_failed": "1 while no KV pages can be written to --kv-cache-dir, else 0",
}
OFFLOAD_COUNTERS = {
    "external_prefix_cache_hits": (
        "kv_offload_loaded_tokens_total",
        "Number of tokens whose keys and values were loaded from the tiers beyond the pool",
    ),
    "kv_offload_loads": ("kv_offload_loads_total", "Number of loads of KV pages into the pool"),
    "kv_offload_load_seconds": (
        "kv_offload_load_seconds_total",
        "Seconds that loads of KV pages took",
    ),
    "kv_offload_stored_pages": (
        "kv_offload_stored_pages_total",
        "Number of KV pages that the tiers beyond the pool have taken in",
    ),
    "kv_offload_missed_pages": (
        "kv_offload_missed_pages_total",
        "Number of loads that ended early, because a KV page was not there any more",
    ),
    "kv_offload_damaged_pages": (
        "kv_offload_damaged_pages_total",
        "Number of files of KV pages that were not what was written",
    ),
}
# Counters with a label: (metric name, help text, label, key of the ring's info).
LABELED_COUNTERS = (
    (
        "request_success",
        "Number of finished choices by their finish reason",
        "finished_reason",
        "ended",
    ),
    (
        "num_aborted_requests",
        "Number of aborted choices by the origin of the abort",
        "reason",
        "aborts",
    ),
    (
        "request_errors",
        "Number of choices that the scheduler ended with an error",
        "code",
        "errors",
    ),
)
# Counters of each tenant, in the order of the numbers in the ring's info.
TENANT_COUNTERS = (
    ("tenant_requests", "Number of requests of a tenant that have ended"),
    ("tenant_prompt_tokens", "Number of prompt tokens of a tenant"),
    ("tenant_cached_tokens", "Number of prompt tokens of a tenant found in the prefix cache"),
    ("tenant_generation_tokens", "Number of generated tokens of a tenant"),
    ("tenant_queue_seconds", "Seconds that the requests of a tenant spent in the waiting queue"),
)
POOL_LABELS = {"page_size": "page_size", "num_pages": "pages_total", "prefix_cache": "prefix_cache"}
