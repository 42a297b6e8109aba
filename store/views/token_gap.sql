-- One row a streamed chunk after the first: how long after the chunk before it. ITL of a chunk of k tokens is gap/k.
-- request_id: request
-- attempt: try of the request
-- vantage: who measured
-- worker: engine instance of the row
-- run_id: run of the row
-- arrival_ns: arrival of the request, which places it in a window
-- ordinal: position of the chunk in its request, from 1 (the first chunk, 0, has no gap)
-- at_ns: instant of the chunk
-- gap_s: time since the chunk before
-- num_tokens: tokens in the chunk; null where the vantage cannot tell
-- is_multi: the chunk holds several tokens, so their gaps are known as a sum only
-- itl_s: gap / tokens; a chunk of unknown size counts as one token
SELECT
    request_id,
    attempt,
    vantage,
    worker,
    run_id,
    arrival_ns,
    ordinal,
    at_ns,
    (at_ns - before_ns) / 1e9 AS gap_s,
    num_tokens,
    num_tokens > 1 AS is_multi,
    (at_ns - before_ns) / 1e9 / greatest(1, coalesce(num_tokens, 1)) AS itl_s
FROM (
    SELECT
        request_id,
        attempt,
        vantage,
        worker,
        run_id,
        arrival_ns,
        unnest(token_ns[2:]) AS at_ns,
        unnest(token_ns[:-2]) AS before_ns,
        unnest(coalesce(token_counts[2:], list_transform(token_ns[2:], lambda t: NULL::BIGINT))) AS num_tokens,
        generate_subscripts(token_ns[2:], 1) AS ordinal
    FROM request
    WHERE len(token_ns) > 1
)
