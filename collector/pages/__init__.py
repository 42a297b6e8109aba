"""Pages for people: rendered here, filled by the same HTTP API that programs use; everything is served from this process."""
