"""`python -m store.views` prints the page about the views."""

from store.views import markdown

print(markdown(), end="")
