"""Programs as users have them, which know nothing of gemmsmith."""
