"""Answers to lookups: found in the store, a near problem's or predicted, kept while they hold."""
