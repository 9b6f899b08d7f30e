"""The service's client: requests to build, replies to read, and who sends them."""
