-- One row a span of a request: every chunk, stall and resume, in order. A phase may occur many times.
-- request_id: request
-- attempt: try of the request
-- vantage: who measured
-- worker: engine instance of the row
-- run_id: run of the row
-- arrival_ns: arrival of the request, which places it in a window
-- ordinal: position of the span in its request, from 0
-- phase: name of the phase
-- start_ns: start of the span
-- end_ns: end of the span
-- duration_s: end - start
-- tokens: tokens that the span worked on
SELECT
    request_id,
    attempt,
    vantage,
    worker,
    run_id,
    arrival_ns,
    ordinal,
    span.phase AS phase,
    span.start_ns AS start_ns,
    span.end_ns AS end_ns,
    (span.end_ns - span.start_ns) / 1e9 AS duration_s,
    span.tokens AS tokens
FROM (
    SELECT
        request_id,
        attempt,
        vantage,
        worker,
        run_id,
        arrival_ns,
        unnest(spans) AS span,
        generate_subscripts(spans, 1) - 1 AS ordinal
    FROM request
    WHERE len(spans) > 0
)
