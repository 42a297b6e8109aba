"""One module a verb, or family of verbs. Each has `register(app)`; heavy imports happen inside the verb."""
