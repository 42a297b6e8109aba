"""What clients ask for: calls made up by seed, or read from a trace. Nothing here knows how they will be served."""
