-- Hand-overs and tier loads: waiting, on the wire, how they ended
SELECT run_id, source_worker, target_worker, outcome, count(*) AS transfers, sum(num_bytes) AS bytes, avg(wait_s) AS wait_s,
       avg(wire_s) AS wire_s, sum(num_bytes) / nullif(sum(wire_s), 0) AS bytes_per_s
FROM transfer
GROUP BY ALL ORDER BY ALL
