-- What a request ran on and who pays. One row a request row at the engine's vantage; where the engine did not report, at the others'.
-- gpu_id: accelerator of the worker, as last known when the request ended
-- pool: pool of the worker, as last known when the request ended
-- gpu_util: step.gpu_util of the worker's last step that had one when the request ended, else the last sample gpu_util
-- memory_util: step.memory_util of the worker's last step that had one when the request ended
-- billable_units: request.billable_units of the row, else of the same request at another vantage
-- cost_center: request.cost_center of the row, else of the same request at another vantage
WITH facts AS (
    SELECT
        worker,
        coalesce(run_id, '') AS run,
        CASE WHEN row_number() OVER known = 1 THEN -9223372036854775807 ELSE at_ns END AS since_ns,
        last_value(gpu_id IGNORE NULLS) OVER known AS gpu_id,
        last_value(pool IGNORE NULLS) OVER known AS pool
    FROM worker
    WINDOW known AS (PARTITION BY worker, run_id ORDER BY at_ns ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
), gpu AS (
    SELECT worker, coalesce(run_id, '') AS run, at_ns, gpu_util FROM step WHERE gpu_util IS NOT NULL
), memory AS (
    SELECT worker, coalesce(run_id, '') AS run, at_ns, memory_util FROM step WHERE memory_util IS NOT NULL
), scraped AS (
    SELECT worker, coalesce(run_id, '') AS run, at_ns, value FROM sample WHERE name = 'gpu_util'
), elsewhere AS (
    SELECT
        request_id,
        coalesce(run_id, '') AS run,
        max(billable_units) AS billable_units,
        min(cost_center) AS cost_center
    FROM request
    WHERE vantage <> 'engine' AND (billable_units IS NOT NULL OR cost_center IS NOT NULL)
    GROUP BY ALL
), served AS (
    SELECT r.*, coalesce(r.run_id, '') AS run
    FROM request AS r
    WHERE r.vantage = 'engine' OR NOT EXISTS (
        SELECT 1 FROM request AS e
        WHERE e.vantage = 'engine' AND e.request_id = r.request_id AND coalesce(e.run_id, '') = coalesce(r.run_id, '')
    )
)
SELECT
    f.gpu_id AS gpu_id,
    f.pool AS pool,
    coalesce(g.gpu_util, p.value) AS gpu_util,
    m.memory_util AS memory_util,
    coalesce(r.billable_units, o.billable_units) AS billable_units,
    coalesce(r.cost_center, o.cost_center) AS cost_center
FROM served AS r
LEFT JOIN elsewhere AS o ON r.request_id = o.request_id AND r.run = o.run
ASOF LEFT JOIN facts AS f ON r.worker = f.worker AND r.run = f.run AND r.at_ns >= f.since_ns
ASOF LEFT JOIN gpu AS g ON r.worker = g.worker AND r.run = g.run AND r.at_ns >= g.at_ns
ASOF LEFT JOIN memory AS m ON r.worker = m.worker AND r.run = m.run AND r.at_ns >= m.at_ns
ASOF LEFT JOIN scraped AS p ON r.worker = p.worker AND r.run = p.run AND r.at_ns >= p.at_ns
