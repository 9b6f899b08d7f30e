"""A base class of plain data, which converts to dictionaries and lists."""

from __future__ import annotations

from typing import Any

import msgspec


class Plain:
    """Data that can be converted to dictionaries, lists, strings and numbers."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, nested ones too, as in the service's JSON."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields
