-- The slowest requests, and what their time went into
SELECT run_id, request_id, worker, tenant, (first_token_ns - arrival_ns) / 1e9 AS ttft_s, frontend_s, queue_s, cache_lookup_s,
       kv_load_s, kv_transfer_s, prefill_s, stalled_s, unexplained_s, prompt_tokens, cached_tokens, num_preemptions
FROM request
WHERE vantage = 'engine' AND first_token_ns IS NOT NULL
ORDER BY ttft_s DESC LIMIT 50
