"""Writes the numbers and the pictures of README.md and the docs from files.

    python -m benchmarks.readme

Nothing is typed in by hand: a block of Markdown stands between two markers, `<!-- NAME -->` and
`<!-- /NAME -->`, and is replaced whole. One file here makes one block.
"""
