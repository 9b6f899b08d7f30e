"""Whether a patch of a model has replaced the forward of a module."""

from __future__ import annotations

from torch import nn

from gemmsmith.ops.models.forwards import Forward


def is_patched(module: nn.Module) -> bool:
    return type(module.__dict__.get("forward")) is Forward
