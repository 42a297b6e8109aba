-- Whose blocks were evicted for whom, and how long they had been unused
WITH stored AS (
    SELECT run_id, worker, block_hash, arg_max(request_id, at_ns) AS stored_for FROM block WHERE change = 'stored' GROUP BY ALL
), tenant_of AS (SELECT run_id, request_id, any_value(tenant) AS tenant FROM request GROUP BY ALL)
SELECT gone.run_id, loser.tenant AS lost_by, winner.tenant AS made_room_for, count(*) AS blocks, median(gone.idle_s) AS idle_s
FROM block AS gone
LEFT JOIN stored ON stored.run_id IS NOT DISTINCT FROM gone.run_id AND stored.worker = gone.worker AND stored.block_hash = gone.block_hash
LEFT JOIN tenant_of AS loser ON loser.run_id IS NOT DISTINCT FROM gone.run_id AND loser.request_id = stored.stored_for
LEFT JOIN tenant_of AS winner ON winner.run_id IS NOT DISTINCT FROM gone.run_id AND winner.request_id = gone.request_id
WHERE gone.change = 'evicted'
GROUP BY ALL ORDER BY blocks DESC LIMIT 50
