"""Finds winners: enumerate, compile, verify, measure, promote. Imports gemmsmith, never service."""
