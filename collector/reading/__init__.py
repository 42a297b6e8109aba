"""Questions of the read API and the pages, answered from the store."""
