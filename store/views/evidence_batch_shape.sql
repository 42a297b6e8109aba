-- The shape of each batch. One row a scheduler step.
-- batch_id: step.batch_id, else worker-step (so the embedded engine names the batch of a check)
-- batch_size: step.batch_size
-- max_seq_len: step.max_seq_len
-- padding_side: step.padding_side
-- padding_ratio: step.padding_ratio
SELECT coalesce(batch_id, worker || '-' || step) AS batch_id, batch_size, max_seq_len, padding_side, padding_ratio
FROM step
