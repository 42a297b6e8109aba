-- TTFT of requests that found something in the cache, and of those that found nothing
SELECT run_id, CASE WHEN cached_tokens > 0 THEN 'found something' ELSE 'found nothing' END AS cache, count(*) AS requests,
       avg((first_token_ns - arrival_ns) / 1e9) AS ttft_mean_s, quantile_disc((first_token_ns - arrival_ns) / 1e9, 0.99) AS ttft_p99_s
FROM request
WHERE vantage = 'engine' AND cached_tokens IS NOT NULL AND first_token_ns IS NOT NULL
GROUP BY ALL ORDER BY ALL
