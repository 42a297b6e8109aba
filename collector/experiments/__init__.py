"""Runs experiments: the same calls to every arm, on the embedded engine in virtual time or on any OpenAI endpoint."""
