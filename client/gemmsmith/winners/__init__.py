"""Winners in a process: lookups, kernel packs and bundles."""
