"""Shows: dashboards as code, generated JSON, publisher."""
