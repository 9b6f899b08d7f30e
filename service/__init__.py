"""The HTTP service and the command line. Imports tuner and gemmsmith."""
