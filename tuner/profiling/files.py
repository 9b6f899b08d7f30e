"""Profiles as files, one for each device model: a header, then one profile a line.

Those that come with the program are in `configs/profiles/`; those that are made here go to
`profiles/` in the state folder, and replace the shipped ones of the same problem. A shipped profile
is a measurement of others: it is shown, and nothing is decided by it.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from gemmsmith.core.problem import Problem
from gemmsmith.files import publish
from tuner import places
from tuner.errors import TunerError
from tuner.profiling.records import ProblemProfile

FORMAT = "gemmsmith-profiles"
SCHEMA = 1
SUFFIX = ".jsonl"

_LOG = logging.getLogger(__name__)


class ProfilesError(TunerError):
    """A file of profiles that cannot be read; the message names it and says what to do."""


class _FileHeader(msgspec.Struct, frozen=True):
    format: str
    schema: int


def shipped_folder() -> Path:
    return places.shipped("configs/profiles")


def own_folder() -> Path:
    return places.state() / "profiles"


def file_in(folder: Path, slug: str) -> Path:
    # The slug may come from outside: characters that file names must not have are replaced.
    return folder / f"{re.sub(r'[^a-z0-9._-]+', '-', slug)[:200]}{SUFFIX}"


def profile_of(problem: Problem, slug: str) -> ProblemProfile | None:
    """The profile of a problem on a device model: the own one, else the shipped one.

    A file that cannot be read counts as empty; a warning says why.
    """
    own, shipped = _recorded(own_folder(), slug), _recorded(shipped_folder(), slug)
    return own.get(problem) or shipped.get(problem)


def recorded(slug: str) -> list[Problem]:
    """The problems that have a profile on a device model."""
    return sorted({**_recorded(own_folder(), slug), **_recorded(shipped_folder(), slug)})


def _recorded(folder: Path, slug: str) -> dict[Problem, ProblemProfile]:
    path = file_in(folder, slug)
    try:
        status = path.stat()
        return _known(path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        return {}
    except (OSError, ProfilesError) as error:
        _LOG.warning("profiles are not shown: %s", error)
        return {}


@functools.lru_cache(maxsize=16)
def _known(path: Path, _changed_ns: int, _size: int) -> dict[Problem, ProblemProfile]:
    return {profile.problem: profile for profile in read_profiles(path)}


def read_profiles(path: Path) -> list[ProblemProfile]:
    """The profiles of a file.

    Raises:
        ProfilesError: not a file of profiles, or written by a newer gemmsmith.
        OSError: it cannot be read.
    """
    first, *lines = path.read_bytes().splitlines() or [b""]
    try:
        header = msgspec.json.decode(first, type=_FileHeader)
        if header.format != FORMAT:
            raise ProfilesError(f"{path} is not a file of profiles but {header.format!r:.80}")
        if not 1 <= header.schema <= SCHEMA:
            raise ProfilesError(
                f"{path} has schema {header.schema}, this gemmsmith reads 1 … {SCHEMA}: upgrade it"
            )
        profiles = [
            msgspec.json.decode(line, type=ProblemProfile) for line in lines if line.strip()
        ]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProfilesError(f"{path} is not a file of profiles: {error}. Remove it") from None
    if any(not side.kernels for p in profiles for side in (p.candidate, p.default, *p.runners_up)):
        raise ProfilesError(f"{path} has a profile without kernels. Remove the file")
    return profiles


def add_profiles(path: Path, added: Iterable[ProblemProfile]) -> None:
    """Put profiles into a file, which is made if it is missing; they replace earlier ones.

    Raises:
        ProfilesError, OSError: as `read_profiles`, or the file cannot be written.
    """
    profiles = {p.problem: p for p in read_profiles(path)} if path.exists() else {}
    profiles |= {profile.problem: profile for profile in added}
    rows = sorted(profiles.values(), key=lambda p: (p.problem.dtype, p.problem.layout, p.problem))
    header = _FileHeader(format=FORMAT, schema=SCHEMA)
    text = b"".join(msgspec.json.encode(row) + b"\n" for row in (header, *rows))
    publish(path, text, shared=True)
