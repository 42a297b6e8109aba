"""One module a command-line verb (or a family of verbs). Each has `register(app)`; heavy imports happen inside the verb."""
