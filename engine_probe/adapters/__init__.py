"""One file an engine: its names mapped to the contract by version, what it provides, what it cannot see."""
