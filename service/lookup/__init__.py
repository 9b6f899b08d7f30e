"""Answers to lookups: a winner, a neighbour's winner or a prediction, kept in memory."""
