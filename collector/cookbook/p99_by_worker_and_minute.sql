-- P99 of TTFT by worker and minute, with how many requests each number rests on
SELECT run_id, worker, time_bucket(INTERVAL 1 MINUTE, make_timestamp_ns(arrival_ns)) AS minute, count(*) AS requests,
       quantile_disc((first_token_ns - arrival_ns) / 1e9, [0.5, 0.95, 0.99]) AS ttft_p50_p95_p99_s
FROM request
WHERE vantage = 'engine' AND first_token_ns IS NOT NULL
GROUP BY ALL ORDER BY ALL
