"""What load generators write and traces that people replay -> `request` rows at the client's vantage, one file a format."""
