-- Blocks that were evicted and stored again within a minute: work that was done twice
SELECT run_id, worker, count(*) AS blocks, sum(num_tokens) AS tokens, median(again_s) AS median_again_s
FROM (
    SELECT run_id, worker, change, num_tokens,
           (lead(at_ns) OVER life - at_ns) / 1e9 AS again_s, lead(change) OVER life AS next_change
    FROM block WHERE change IN ('stored', 'evicted') AND coalesce(tier, 'device') = 'device'
    WINDOW life AS (PARTITION BY run_id, worker, block_hash ORDER BY at_ns)
)
WHERE change = 'evicted' AND next_change = 'stored' AND again_s < 60
GROUP BY ALL ORDER BY ALL
