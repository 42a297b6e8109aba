-- How the prompt of each request was computed. One row a request row at the engine's vantage.
-- input_tokens: request.prompt_tokens of the row, else of the same request at another vantage
-- sequence_length: input_tokens + request.output_tokens, the sequence when it ended
-- prefill_ms: request.prefill_s in milliseconds
-- prompt_cache_hit: request.cached_tokens above 0, of the row, else of the same request at another vantage
-- attention_backend: of the step that covers the request's prefill (the first step of its worker that ended at or after request.first_scheduled_ns), else the worker's flag attention_backend
WITH facts AS (
    SELECT
        worker,
        coalesce(run_id, '') AS run,
        CASE WHEN row_number() OVER known = 1 THEN -9223372036854775807 ELSE at_ns END AS since_ns,
        last_value(flags['attention_backend'] IGNORE NULLS) OVER known AS attention_backend
    FROM worker
    WINDOW known AS (PARTITION BY worker, run_id ORDER BY at_ns ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
), backend AS (
    SELECT worker, coalesce(run_id, '') AS run, at_ns, attention_backend FROM step WHERE attention_backend IS NOT NULL
), elsewhere AS (
    SELECT
        request_id,
        coalesce(run_id, '') AS run,
        max(prompt_tokens) AS prompt_tokens,
        max(output_tokens) AS output_tokens,
        max(cached_tokens) AS cached_tokens
    FROM request
    WHERE vantage <> 'engine'
    GROUP BY ALL
), prefill AS (
    SELECT *, coalesce(run_id, '') AS run FROM request WHERE vantage = 'engine'
)
SELECT
    coalesce(r.prompt_tokens, o.prompt_tokens) AS input_tokens,
    coalesce(r.prompt_tokens, o.prompt_tokens) + coalesce(r.output_tokens, o.output_tokens) AS sequence_length,
    r.prefill_s * 1000 AS prefill_ms,
    coalesce(r.cached_tokens, o.cached_tokens) > 0 AS prompt_cache_hit,
    coalesce(s.attention_backend, f.attention_backend) AS attention_backend
FROM prefill AS r
LEFT JOIN elsewhere AS o ON r.request_id = o.request_id AND r.run = o.run
ASOF LEFT JOIN backend AS s ON r.worker = s.worker AND r.run = s.run AND r.first_scheduled_ns <= s.at_ns
ASOF LEFT JOIN facts AS f ON r.worker = f.worker AND r.run = f.run AND r.arrival_ns >= f.since_ns
