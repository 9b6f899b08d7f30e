"""Commands that install optional requirements, by names that package indexes have.

gemmsmith itself is not on any index, where others could register its names. So our commands never
name it; they list the requirements of an extra of the service instead, from its metadata.
"""

from __future__ import annotations

import json
import re
import shlex
from importlib import metadata
from urllib.parse import urlsplit
from urllib.request import url2pathname

from gemmsmith.version import VERSION
from tuner import places

_SERVICE = "gemmsmith-service"


def pip_install(extra: str) -> str:
    """The command that installs what an extra of the service needs: `parquet`, `fleet` …"""
    return f"pip install {' '.join(map(shlex.quote, _requirements(extra)))}"


def library() -> str:
    """The library as an argument of `pip install`: its folder in a checkout, else its wheel."""
    if places.CHECKOUT is not None:
        return shlex.quote(str(places.CHECKOUT / "client"))
    try:
        origin = json.loads(metadata.distribution("gemmsmith").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    path = urlsplit(str(origin.get("url", ""))).path
    return shlex.quote(url2pathname(path) or f"gemmsmith-{VERSION}-cp311-abi3-….whl")


def _requirements(extra: str) -> list[str]:
    """Other projects' packages that an extra requires, with those of extras that it includes."""
    packages: dict[str, None] = {}
    try:
        listed = metadata.requires(_SERVICE) or []
    except metadata.PackageNotFoundError:  # run from its sources, not installed
        listed = []
    for line in listed:
        requirement, _, marker = line.partition("; ")
        if marker != f'extra == "{extra}"':
            continue
        if own := re.fullmatch(rf"{_SERVICE}\[(.*)\]", requirement):
            for other in own[1].split(","):
                packages |= dict.fromkeys(_requirements(other))
        else:
            packages[requirement] = None
    return list(packages)
