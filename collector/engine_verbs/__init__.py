"""The verbs of `kvscope engine`, one file each with a function `register(group)`."""
