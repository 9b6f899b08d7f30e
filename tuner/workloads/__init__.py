"""Operands, references and torch's own calls for each family of operations; one file per family.

`footprint` and `spreads` are plain arithmetic, which the service uses too. All other modules need
torch, and run in the measuring child.
"""
