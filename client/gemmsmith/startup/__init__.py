"""Code that runs when Python starts, if environment variables ask for it."""
