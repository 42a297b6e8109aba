-- What requests waited for, summed over steps: blocks, budget, seats
SELECT run_id, worker, count(*) AS steps, sum(num_waiting_prefill) AS waiting, sum(waiting_on.blocks) AS on_blocks,
       sum(waiting_on.budget) AS on_budget, sum(waiting_on.seats) AS on_seats, max(oldest_wait_s) AS oldest_wait_s
FROM step
GROUP BY ALL ORDER BY ALL
