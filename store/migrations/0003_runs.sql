-- The list of runs, so that naming them does not scan every kind.

CREATE TABLE run (
    run_id VARCHAR NOT NULL,
    first_received_ns BIGINT NOT NULL
);

INSERT INTO run
SELECT run_id, min(received_ns)
FROM (
    SELECT run_id, received_ns FROM request
    UNION ALL
    SELECT run_id, received_ns FROM step
    UNION ALL
    SELECT run_id, received_ns FROM block
    UNION ALL
    SELECT run_id, received_ns FROM route
    UNION ALL
    SELECT run_id, received_ns FROM transfer
    UNION ALL
    SELECT run_id, received_ns FROM worker
    UNION ALL
    SELECT run_id, received_ns FROM "check"
    UNION ALL
    SELECT run_id, received_ns FROM sample
    UNION ALL
    SELECT run_id, received_ns FROM mark
)
WHERE run_id IS NOT NULL
GROUP BY run_id;
