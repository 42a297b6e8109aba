"""Several engines behind one router: what the router believes, and how it chooses."""
