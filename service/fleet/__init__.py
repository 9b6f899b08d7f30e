"""Many GPUs: Ray places workers on machines, the database stays the record and the one queue.

Ray is imported here and nowhere else, and only by `driver`, `local` and `running`.
"""
