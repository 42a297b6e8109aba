-- Tenants: requests, tokens, what they find, how slow they are
SELECT run_id, tenant, count(*) AS requests, sum(prompt_tokens) AS prompt_tokens, sum(output_tokens) AS output_tokens,
       sum(cached_tokens) / sum(prompt_tokens) AS token_hit_rate, quantile_disc((first_token_ns - arrival_ns) / 1e9, 0.99) AS ttft_p99_s
FROM request
WHERE vantage = 'engine' AND tenant IS NOT NULL
GROUP BY ALL ORDER BY prompt_tokens DESC LIMIT 50
