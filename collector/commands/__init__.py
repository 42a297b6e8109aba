"""One module a command-line verb (or family of verbs). Each has `register(app)`; heavy imports happen inside the verb."""
