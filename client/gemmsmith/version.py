"""The version of gemmsmith, which both distributions share."""

VERSION = "0.1.0"
