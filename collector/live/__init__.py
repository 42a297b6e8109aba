"""What is going on right now, counted from committed rows: the live table, `/metrics`, the live ledger."""
