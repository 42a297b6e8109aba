-- How tokens came out. One row a request row at the engine's vantage; where the engine did not report, at the others'.
-- output_tokens: request.output_tokens
-- tokens_per_second: (output_tokens - 1) / (last_token_ns - first_token_ns), the inverse of TPOT
-- decode_ms: request.decode_s in milliseconds
-- speculative_accept_rate: request.accepted_tokens / request.draft_tokens
SELECT
    r.output_tokens AS output_tokens,
    CASE WHEN r.output_tokens > 1 AND r.last_token_ns > r.first_token_ns
        THEN (r.output_tokens - 1) / ((r.last_token_ns - r.first_token_ns) / 1e9) END AS tokens_per_second,
    r.decode_s * 1000 AS decode_ms,
    r.accepted_tokens / nullif(r.draft_tokens, 0) AS speculative_accept_rate
FROM request AS r
WHERE r.vantage = 'engine' OR NOT EXISTS (
    SELECT 1 FROM request AS e
    WHERE e.vantage = 'engine' AND e.request_id = r.request_id AND coalesce(e.run_id, '') = coalesce(r.run_id, '')
)
