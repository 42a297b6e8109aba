"""Tests: unit (one module), contract (one promise over all), property (Hypothesis), integration (real servers)."""
