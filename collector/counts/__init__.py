"""What `/metrics` tells of the watched fleet, counted from committed rows a batch at a time; every label is bounded."""
