"""Kernels → C++ translation units behind the project's C ABI."""

from tuner.codegen.slim import write_slim_headers
from tuner.codegen.unit import HEADERS, headers_digest, kernel_digest, unit_source

__all__ = ["HEADERS", "headers_digest", "kernel_digest", "unit_source", "write_slim_headers"]
