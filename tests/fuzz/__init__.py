"""Coverage-guided fuzzing of every decoder: bytes in, rows or one of our errors out; no crash, no hang, bounded memory."""
