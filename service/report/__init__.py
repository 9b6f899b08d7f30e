"""The comparison with cuBLAS: rows computed from winners and ceilings, as CSV and JSON.

`problem_rows` and `reasons` are pure functions; `export`, and `service.pages.report` for HTML, turn
their results into text. The command `gemmsmith report` writes the files. Nothing here imports torch
or opens the database.
"""
