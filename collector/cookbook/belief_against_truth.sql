-- Tokens that the router expected in the cache of the worker it chose, and those that were found there
SELECT route.run_id, route.chosen, count(*) AS requests,
       avg(list_filter(candidates, c -> c.worker = chosen)[1].matched_tokens) AS expected_tokens, avg(cached_tokens) AS found_tokens
FROM route JOIN request ON request.request_id = route.request_id AND request.run_id IS NOT DISTINCT FROM route.run_id
    AND request.worker = route.chosen AND request.vantage = 'engine'
GROUP BY ALL ORDER BY ALL
