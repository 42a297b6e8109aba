"""Looks at everything between an engine and a verdict, and says what is wrong and what to do: `kvscope doctor`."""
