"""What Prometheus is told: counted in this process, or read from the database."""
