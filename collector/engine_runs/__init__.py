"""What `kvscope engine run` is made of: the fleet that serves the calls, and what it came to."""
