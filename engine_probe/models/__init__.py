"""What a model is, told by the fields of its config.json: its KV cache, its layers, and the well-known ones by name."""
