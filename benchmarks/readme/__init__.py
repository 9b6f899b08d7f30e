"""Writes the numbers and the picture of README.md and docs/benchmarks.md from files.

    python -m benchmarks.readme

Nothing is typed in by hand: a block of Markdown stands between two markers, `<!-- NAME -->` and
`<!-- /NAME -->`, and is replaced whole. One file here makes one block.
"""
