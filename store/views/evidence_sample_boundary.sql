-- Where samples end within a batch. One row a check of sample boundaries.
-- sample_ids: check.sample_ids
-- segment_ids: check.segment_ids
-- document_boundary: check.document_boundary
-- eos_policy: check.eos_policy
-- packing_version: check.packing_version
SELECT sample_ids, segment_ids, document_boundary, eos_policy, packing_version
FROM "check"
WHERE "check" = 'sample_boundary'
