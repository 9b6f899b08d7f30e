"""What measuring needs to know of each family of operations: one file per family.

`footprint` is plain arithmetic, which the service uses too; everything else needs torch, and runs
in the measuring child.
"""
