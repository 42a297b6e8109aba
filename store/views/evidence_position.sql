-- How positions run and whether one sample can see another. One row a check of positions, and one a leakage check of a batch that has no check of positions.
-- position_ids_strategy: check.position_ids_strategy
-- truncation_side: check.truncation_side
-- chat_template_version: check.chat_template_version, else the worker's as last known at the check
-- leakage_test_result: check.leakage_test_result of the row, else of the batch's latest leakage check
WITH facts AS (
    SELECT
        worker,
        coalesce(run_id, '') AS run,
        CASE WHEN row_number() OVER known = 1 THEN -9223372036854775807 ELSE at_ns END AS since_ns,
        last_value(chat_template_version IGNORE NULLS) OVER known AS chat_template_version
    FROM worker
    WINDOW known AS (PARTITION BY worker, run_id ORDER BY at_ns ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
), leakage AS (
    SELECT batch_id, coalesce(run_id, '') AS run, arg_max(leakage_test_result, at_ns) AS leakage_test_result
    FROM "check"
    WHERE "check" = 'leakage' AND batch_id IS NOT NULL
    GROUP BY ALL
), checked AS (
    SELECT c.*, coalesce(c.run_id, '') AS run
    FROM "check" AS c
    WHERE c."check" = 'position' OR (c."check" = 'leakage' AND NOT EXISTS (
        SELECT 1 FROM "check" AS p
        WHERE p."check" = 'position' AND p.batch_id = c.batch_id AND coalesce(p.run_id, '') = coalesce(c.run_id, '')
    ))
)
SELECT
    c.position_ids_strategy AS position_ids_strategy,
    c.truncation_side AS truncation_side,
    coalesce(c.chat_template_version, f.chat_template_version) AS chat_template_version,
    coalesce(c.leakage_test_result, l.leakage_test_result) AS leakage_test_result
FROM checked AS c
LEFT JOIN leakage AS l ON c.batch_id = l.batch_id AND c.run = l.run
ASOF LEFT JOIN facts AS f ON c.worker = f.worker AND c.run = f.run AND c.at_ns >= f.since_ns
