-- What ran together and what waited. One row a scheduler step.
-- batch_size: step.batch_size
-- active_sequences: step.num_running
-- waiting_queue: step.num_waiting_prefill + step.num_waiting_decode; where only one of them is known, that one
-- priority_class: classes of the requests first scheduled in the step, in alphabetical order with commas; null where none was
-- scheduler_policy: step.policy
WITH batch AS (
    SELECT *, coalesce(run_id, '') AS run FROM step
), admitted AS (
    SELECT s.worker, s.run, s.at_ns, string_agg(DISTINCT r.priority_class, ',' ORDER BY r.priority_class) AS priority_class
    FROM (
        SELECT worker, coalesce(run_id, '') AS run, first_scheduled_ns, priority_class
        FROM request
        WHERE vantage = 'engine' AND priority_class IS NOT NULL AND first_scheduled_ns IS NOT NULL
    ) AS r
    ASOF JOIN (SELECT DISTINCT worker, run, at_ns FROM batch) AS s
        ON r.worker = s.worker AND r.run = s.run AND r.first_scheduled_ns <= s.at_ns
    GROUP BY ALL
)
SELECT
    s.batch_size AS batch_size,
    s.num_running AS active_sequences,
    coalesce(s.num_waiting_prefill + s.num_waiting_decode, s.num_waiting_prefill, s.num_waiting_decode) AS waiting_queue,
    a.priority_class AS priority_class,
    s.policy AS scheduler_policy
FROM batch AS s
LEFT JOIN admitted AS a ON s.worker = a.worker AND s.run = a.run AND s.at_ns = a.at_ns
