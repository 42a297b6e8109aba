"""What `kvscope dashboards check` asks its questions of: a fleet that lives now, its collector, a Prometheus that scrapes both."""
