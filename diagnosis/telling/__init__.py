"""A verdict in words: for a terminal, a page, a document."""
