-- The longest gaps between tokens, and the requests that had them
SELECT run_id, request_id, worker, max(gap_s) AS longest_gap_s, count(*) AS gaps, quantile_disc(gap_s, 0.5) AS median_gap_s
FROM token_gap
GROUP BY ALL ORDER BY longest_gap_s DESC LIMIT 30
