-- Whether masks are what they should be. One row a check of masks.
-- attention_mask_hash: check.attention_mask_hash
-- causal_mask_mode: check.causal_mask_mode
-- loss_mask_hash: check.loss_mask_hash
-- ignore_index: check.ignore_index
SELECT attention_mask_hash, causal_mask_mode, loss_mask_hash, ignore_index
FROM "check"
WHERE "check" = 'mask'
