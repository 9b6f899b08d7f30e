"""The comparison with cuBLAS: rows computed from winners and ceilings, as CSV and JSON.

`rows` and `reasons` are pure; `export`, and `service.pages.report` for HTML, turn them into text.
The command `gemmsmith report` writes the files.
Nothing here imports torch or opens the database.
"""
