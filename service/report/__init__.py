"""The comparison with cuBLAS: rows computed from winners and ceilings, as page, CSV and JSON.

`rows` and `reasons` are pure; `page` and `export` turn them into text. The command
`gemmsmith report` writes the files.
Nothing here imports torch or opens the database.
"""
