"""Backends of packages beside gemmsmith: what they extend, and a launcher for cubins."""
