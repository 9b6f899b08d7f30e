"""Metrics for Prometheus, counted in this process or read from the database."""
