-- What is stored, run by run and kind by kind
SELECT 'request' AS kind, run_id, count(*) AS rows, make_timestamp_ns(min(at_ns)) AS first, make_timestamp_ns(max(at_ns)) AS last FROM request GROUP BY ALL
UNION ALL SELECT 'step', run_id, count(*), make_timestamp_ns(min(at_ns)), make_timestamp_ns(max(at_ns)) FROM step GROUP BY ALL
UNION ALL SELECT 'block', run_id, count(*), make_timestamp_ns(min(at_ns)), make_timestamp_ns(max(at_ns)) FROM block GROUP BY ALL
UNION ALL SELECT 'route', run_id, count(*), make_timestamp_ns(min(at_ns)), make_timestamp_ns(max(at_ns)) FROM route GROUP BY ALL
UNION ALL SELECT 'sample', run_id, count(*), make_timestamp_ns(min(at_ns)), make_timestamp_ns(max(at_ns)) FROM sample GROUP BY ALL
ORDER BY ALL
