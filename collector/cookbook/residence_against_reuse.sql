-- How long blocks were unused when they were hit (reuse gap) and when they were evicted (residence)
SELECT run_id, worker, change, count(*) AS blocks, quantile_disc(idle_s, [0.1, 0.5, 0.9]) AS idle_p10_p50_p90_s
FROM block
WHERE change IN ('hit', 'evicted') AND reason IS DISTINCT FROM 'self' AND idle_s IS NOT NULL
GROUP BY ALL ORDER BY ALL
