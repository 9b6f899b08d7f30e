"""How to install what is optional, by names that package indexes have.

gemmsmith itself is on no index: strangers could register its names there. So no command of ours
names it; what an extra of the service needs is listed instead, as its metadata has it.
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
    """What `pip install` takes for the library: its folder in a checkout, else its wheel."""
    if places.CHECKOUT is not None:
        return shlex.quote(str(places.CHECKOUT / "client"))
    try:
        origin = json.loads(metadata.distribution("gemmsmith").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    path = urlsplit(str(origin.get("url", ""))).path
    return shlex.quote(url2pathname(path) or f"gemmsmith-{VERSION}-cp311-abi3-….whl")


def _requirements(extra: str) -> list[str]:
    """The other projects' packages that an extra lists, those of extras that it includes too."""
    found: dict[str, None] = {}
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
                found |= dict.fromkeys(_requirements(other))
        else:
            found[requirement] = None
    return list(found)
