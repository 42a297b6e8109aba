-- Requests that were preempted, and the tokens they computed again
SELECT run_id, worker, count(*) AS requests, sum(num_preemptions) AS preemptions, sum(recomputed_tokens) AS recomputed_tokens,
       avg(stalled_s) AS stalled_s
FROM request
WHERE num_preemptions > 0
GROUP BY ALL ORDER BY ALL
