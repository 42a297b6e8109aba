"""What an engine's loop calls, and how its notes become rows."""
