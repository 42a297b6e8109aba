"""Which worker gets more than it can serve, why the router sends it there, what that costs, and what to change."""
