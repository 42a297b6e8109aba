-- How full the KV cache was. One row a scheduler step.
-- kv_cache_bytes: step.kv_cache_bytes, else step.blocks_used times the worker's kv_bytes_per_block
-- block_usage: step.blocks_used / step.blocks_total
-- eviction_count: step.blocks_evicted
-- reuse_rate: cached over prompt tokens of the requests that arrived at the worker in the minute of the step, each once
-- max_context: the worker's longest sequence, as last known at the step
WITH facts AS (
    SELECT
        worker,
        coalesce(run_id, '') AS run,
        CASE WHEN row_number() OVER known = 1 THEN -9223372036854775807 ELSE at_ns END AS since_ns,
        last_value(max_context IGNORE NULLS) OVER known AS max_context,
        last_value(kv_bytes_per_block IGNORE NULLS) OVER known AS kv_bytes_per_block
    FROM worker
    WINDOW known AS (PARTITION BY worker, run_id ORDER BY at_ns ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
), reuse AS (
    SELECT worker, run, minute, sum(cached_tokens) / nullif(sum(prompt_tokens), 0) AS reuse_rate
    FROM (
        SELECT
            worker,
            coalesce(run_id, '') AS run,
            request_id,
            attempt,
            min(arrival_ns) // 60000000000 AS minute,
            max(cached_tokens) AS cached_tokens,
            max(prompt_tokens) AS prompt_tokens
        FROM request
        WHERE cached_tokens IS NOT NULL AND prompt_tokens IS NOT NULL
        GROUP BY worker, run_id, request_id, attempt
    )
    GROUP BY ALL
), watermark AS (
    SELECT *, coalesce(run_id, '') AS run, at_ns // 60000000000 AS minute FROM step
)
SELECT
    coalesce(s.kv_cache_bytes, s.blocks_used * f.kv_bytes_per_block) AS kv_cache_bytes,
    s.blocks_used / nullif(s.blocks_total, 0) AS block_usage,
    s.blocks_evicted AS eviction_count,
    u.reuse_rate AS reuse_rate,
    f.max_context AS max_context
FROM watermark AS s
LEFT JOIN reuse AS u ON s.worker = u.worker AND s.run = u.run AND s.minute = u.minute
ASOF LEFT JOIN facts AS f ON s.worker = f.worker AND s.run = f.run AND s.at_ns >= f.since_ns
