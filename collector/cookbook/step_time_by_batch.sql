-- Step time by the size of the batch: is it slow because it is full, or slow at equal work?
SELECT run_id, worker, num_running // 8 * 8 AS running_from, count(*) AS steps, avg(duration_s) AS step_s,
       avg(prefill_tokens) AS prefill_tokens, avg(decode_tokens) AS decode_tokens
FROM step
WHERE num_running > 0
GROUP BY ALL ORDER BY ALL
