"""Writes the numbers and the pictures of README.md and the docs from files.

    python -m benchmarks.readme

A block of Markdown between two markers, `<!-- NAME -->` and `<!-- /NAME -->`, is replaced as a
whole. Each module here makes a block or a picture.
"""
