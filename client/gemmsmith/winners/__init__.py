"""What a process keeps of a service: the winners it looks up, kernel packs and bundles."""
