-- What people should see on a time axis
SELECT run_id, make_timestamp_ns(at_ns) AS at, mark, worker, subject, text FROM mark ORDER BY at_ns
