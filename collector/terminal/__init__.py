"""What the verbs share: where answers come from and where results go, options, width of text."""
