"""Many GPUs: Ray places workers on machines; records and the queue stay in the database.

An optional part, which needs the extra `fleet`. Only `gemmsmith fleet` imports it, and only its
modules `driver`, `local` and `running` import Ray.
"""
