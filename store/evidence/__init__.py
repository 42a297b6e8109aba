"""Set-based questions that a diagnosis asks of the rows."""
