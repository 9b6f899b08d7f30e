"""Integrations with training libraries. Each module imports the library that it is for."""
