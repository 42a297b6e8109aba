"""Checks of the telemetry, one family a module: what was delivered, clocks, tokens, gauges, and one window against the other."""
