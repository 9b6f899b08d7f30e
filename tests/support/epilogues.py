"""Epilogues by kind."""

from __future__ import annotations

from gemmsmith.core.epilogue import Epilogue

GATED = [epilogue for epilogue in Epilogue if epilogue.is_gated]
BACKWARD = [epilogue for epilogue in Epilogue if epilogue.backward]
FUSED = [each for each in Epilogue if each not in (Epilogue.NONE, *GATED, *BACKWARD)]
"""Epilogues after linear layers: factors, bias, activation, residual."""
STORED = [
    epilogue
    for epilogue in (*FUSED, *GATED)
    if epilogue.has_bias or epilogue.is_gated
    if not (epilogue.has_residual or epilogue.stores_aux or epilogue.has_row_scale)
]
"""Epilogues with an FP8 output."""
