"""What is plain data, for people too: as dictionaries and lists, as JSON has it."""

from __future__ import annotations

from typing import Any

import msgspec


class Plain:
    """Data that can be had as dictionaries, lists, texts and numbers."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Its fields by name, down to the last, as the service's JSON has them."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found
