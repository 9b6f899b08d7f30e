"""What a device model's GPU was measured to do at best, from the file that `gemmsmith ceilings`
writes; a file that cannot be read is as good as none, and the log says so.
"""

from __future__ import annotations

import structlog

from tuner.measure.ceilings import Ceilings, CeilingsError, path_for, read_ceilings

log = structlog.get_logger("gemmsmith.service")


def ceilings_of(device: str) -> Ceilings | None:
    """Those of the device model with that slug; None where none were measured."""
    path = path_for(device)
    try:
        return read_ceilings(path) if path.is_file() else None
    except CeilingsError as error:
        log.warning("ceilings unusable", error=str(error))
        return None
