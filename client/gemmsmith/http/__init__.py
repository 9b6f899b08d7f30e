"""The client of a service: builds requests, sends them, and reads the replies."""
