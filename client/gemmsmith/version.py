"""The one place that says which gemmsmith this is; both distributions share it."""

VERSION = "0.1.0"
