"""gemmsmith in other libraries' hands: a module for each, which imports it."""
