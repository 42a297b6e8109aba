"""How much of the change each cause owns, and who is blamed."""
