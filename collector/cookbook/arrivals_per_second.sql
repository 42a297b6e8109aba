-- Requests that arrived each second, and the tokens they brought
SELECT run_id, time_bucket(INTERVAL 1 SECOND, make_timestamp_ns(arrival_ns)) AS second, count(*) AS requests, sum(prompt_tokens) AS prompt_tokens
FROM request
WHERE vantage = 'engine'
GROUP BY ALL ORDER BY ALL
