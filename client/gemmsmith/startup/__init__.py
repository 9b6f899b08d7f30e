"""What environment variables switch on when Python starts."""
