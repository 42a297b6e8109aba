-- The prefixes with most requests, on how many workers they are, and how much of them is found
SELECT run_id, prefix_hash, count(*) AS requests, count(DISTINCT worker) AS workers, sum(cached_tokens) / sum(prompt_tokens) AS token_hit_rate,
       quantile_disc((first_token_ns - arrival_ns) / 1e9, 0.99) AS ttft_p99_s
FROM request
WHERE vantage = 'engine' AND prefix_hash IS NOT NULL
GROUP BY ALL ORDER BY requests DESC LIMIT 30
