"""From the store to the facts of a window: the only room of diagnosis that reads."""
