-- Request hit rate, token hit rate and reused tokens by worker: three numbers, never one
SELECT run_id, worker, avg((cached_tokens > 0)::INT) AS request_hit_rate, sum(cached_tokens) / sum(prompt_tokens) AS token_hit_rate,
       sum(cached_tokens) AS reused_tokens, sum(self_hit_tokens) AS self_hit_tokens
FROM request
WHERE vantage = 'engine' AND cached_tokens IS NOT NULL
GROUP BY ALL ORDER BY ALL
