"""Tells: rules with pending, firing and resolved state, webhook delivery, generated Prometheus and Alertmanager files."""
