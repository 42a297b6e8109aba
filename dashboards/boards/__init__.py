"""Dashboards, one subject a module; each has a `BOARD`."""
