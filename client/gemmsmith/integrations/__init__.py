"""Integrations with training libraries: one module each, which imports its library."""
