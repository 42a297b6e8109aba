-- How requests ended: state, reason, status
SELECT run_id, vantage, state, finish_reason, http_status, error, count(*) AS requests
FROM request
GROUP BY ALL ORDER BY requests DESC
