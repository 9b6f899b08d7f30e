"""Epilogues by kind."""

from __future__ import annotations

from gemmsmith.core.epilogue import Epilogue

FUSED = [
    each
    for each in Epilogue
    if each is not Epilogue.NONE and not each.is_gated and each.backward is None
]
"""Epilogues after linear layers: factors, bias, activation, residual."""
