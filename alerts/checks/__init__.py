"""What the evaluator looks for: one file a check."""
