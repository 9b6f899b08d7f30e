"""Limits on what is read from a service or a file, neither of which is trusted."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Upper limits, in bytes unless the name says otherwise.

    Attributes:
        answer_bytes: any answer that is not listed below; an answer to 256 lookups has 0.5 MB.
        snapshot_bytes: a snapshot; 200,000 winners have about 150 MB.
        pack_bytes: a kernel pack.
        event_bytes: an event of a job's stream.
        listing_bytes: all pages of a listing together; a million trials have about 700 MB.
        pages: number of pages of a listing.

    Raises:
        ValueError: a bound is not a positive integer.
    """

    answer_bytes: int = 16 * 2**20
    snapshot_bytes: int = 256 * 2**20
    pack_bytes: int = 512 * 2**20
    event_bytes: int = 2**20
    listing_bytes: int = 2**30
    pages: int = 100_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} must be a positive integer, got {value!r}")


BOUNDS = Bounds()
"""The default limits."""


def exceeded(subject: str, bound: str, bounds: Bounds) -> str:
    """The error message for a subject that is larger than a bound allows."""
    return (
        f"{subject} exceeds {bound}={getattr(bounds, bound)}: if that is expected, raise the limit "
        f"with bounds=Bounds({bound}=…) of gemmsmith"
    )
