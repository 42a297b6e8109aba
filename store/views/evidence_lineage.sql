-- Which ids belong together. One row a request row at the engine's vantage; where the engine did not report, at the others'.
-- request_id: request.request_id
-- generation_id: request.generation_id of the row, else of the same request at another vantage
-- route_id: request.route_id of the row, else of the same request at another vantage
-- engine_version: release of the worker's engine, as last known when the request arrived
-- trace_id: request.trace_id of the row, else of the same request at another vantage
WITH facts AS (
    SELECT
        worker,
        coalesce(run_id, '') AS run,
        CASE WHEN row_number() OVER known = 1 THEN -9223372036854775807 ELSE at_ns END AS since_ns,
        last_value(engine_version IGNORE NULLS) OVER known AS engine_version
    FROM worker
    WINDOW known AS (PARTITION BY worker, run_id ORDER BY at_ns ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
), elsewhere AS (
    SELECT
        request_id,
        coalesce(run_id, '') AS run,
        min(generation_id) AS generation_id,
        min(route_id) AS route_id,
        min(trace_id) AS trace_id
    FROM request
    WHERE vantage <> 'engine'
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
    r.request_id AS request_id,
    coalesce(r.generation_id, o.generation_id) AS generation_id,
    coalesce(r.route_id, o.route_id) AS route_id,
    f.engine_version AS engine_version,
    coalesce(r.trace_id, o.trace_id) AS trace_id
FROM served AS r
LEFT JOIN elsewhere AS o ON r.request_id = o.request_id AND r.run = o.run
ASOF LEFT JOIN facts AS f ON r.worker = f.worker AND r.run = f.run AND r.arrival_ns >= f.since_ns
