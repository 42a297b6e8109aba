"""Alerting in the service: the threads, the intake of Alertmanager, the answers."""
