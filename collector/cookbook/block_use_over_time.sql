-- KV blocks by state, second by second
SELECT run_id, worker, time_bucket(INTERVAL 1 SECOND, make_timestamp_ns(at_ns)) AS second, avg(blocks_used) AS used,
       avg(blocks_cached) AS cached, max(blocks_total) AS total, sum(blocks_evicted) AS evicted
FROM step
WHERE blocks_total IS NOT NULL
GROUP BY ALL ORDER BY ALL
