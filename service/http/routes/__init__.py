"""Routes, one module per noun of the HTTP contract."""
