-- Where the router sent requests, and what it believed of the worker that it chose
SELECT run_id, router, policy, chosen, count(*) AS decisions, avg(decision_s) AS decision_s,
       avg(list_filter(candidates, c -> c.worker = chosen)[1].matched_tokens) AS matched_tokens,
       avg(list_filter(candidates, c -> c.worker = chosen)[1].load) AS load
FROM route
GROUP BY ALL ORDER BY ALL
