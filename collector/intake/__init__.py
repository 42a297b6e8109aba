"""Bodies in: bounded, decoded, validated, committed, answered."""
