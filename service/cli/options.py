"""The options that commands share, and how their words become the program's types.

Precedence everywhere: option, then environment variable `GEMMSMITH_…`, then default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from gemmsmith.core.device import called
from gemmsmith.core.names import named_layout
from gemmsmith.core.operation import Layout, of_dtype
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.errors import InvalidProblem
from service.cli import completion
from service.cli.output import CommandError, MisuseError

if TYPE_CHECKING:
    from gemmsmith.http.client import Client
    from service.settings import Settings


_NO_HOST = re.compile(r"Name or service not known|No address associated|failure in name resolution")
_NO_TLS = re.compile(r"WRONG_VERSION_NUMBER|wrong version number|RECORD_LAYER_FAILURE")
_REFUSED = re.compile(r"Connection refused|All connection attempts failed|No route to host")
_NO_ROUTE = (404, "Not Found")
"""What a service says of a path that is none of its own."""


def extent(text: str | int) -> int:
    """A size as typed.

    Raises:
        MisuseError: not an integer. Whether it is in range is the problem's own to say.
    """
    try:
        return int(text)
    except ValueError:
        raise MisuseError(
            f"M, N and K must be integers in 1 … {MAX_EXTENT}, got {text!r}"
        ) from None


_M = "Rows of A and D; or all three sizes in one word, 4096x6144x1024."
_N = "Columns of B and D."
_K = "Columns of A, rows of B."

M = Annotated[int, typer.Argument(metavar="M", help=_M, parser=extent, show_default=False)]
N = Annotated[int, typer.Argument(metavar="N", help=_N, parser=extent, show_default=False)]
K = Annotated[
    int,
    typer.Argument(metavar="K", help=_K, parser=extent, show_default=False),
]
OptionalM = Annotated[
    int | None, typer.Argument(metavar="M", help=_M, parser=extent, show_default=False)
]
OptionalN = Annotated[
    int | None, typer.Argument(metavar="N", help=_N, parser=extent, show_default=False)
]
OptionalK = Annotated[
    int | None, typer.Argument(metavar="K", help=_K, parser=extent, show_default=False)
]
DTypeName = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Element types: bf16, fp16, fp8_e4m3, fp8_e5m2, int8 or tf32.",
        autocompletion=completion.dtypes,
    ),
]
LayoutName = Annotated[
    str | None,
    typer.Option(
        "--layout",
        help="A and B, t row-major, n column-major: tn (linear layer; the default), tt, nt or nn.",
        autocompletion=completion.layouts,
        show_default=False,
    ),
]
Batch = Annotated[int, typer.Option("--batch", help="Independent products of this shape.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="Database (GEMMSMITH_DATABASE; else gemmsmith.db among the user's data).",
        show_default=False,
    ),
]
Packs = Annotated[
    Path | None,
    typer.Option(
        "--packs",
        help="Folder of compiled kernel packs (GEMMSMITH_PACKS; else among the user's data).",
        show_default=False,
    ),
]
Sweeps = Annotated[
    Path | None,
    typer.Option(
        "--sweeps",
        help="Folder of recorded sweeps (GEMMSMITH_SWEEPS; else the shipped ones).",
        show_default=False,
    ),
]
DTypeNames = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        "--dtypes",
        help="Element types: bf16, fp16, fp8_e4m3, fp8_e5m2, int8, tf32; repeatable, or with "
        "commas. Default: what the suite's problems say, else bf16.",
        autocompletion=completion.dtypes,
        show_default=False,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Device to measure on: cuda:0, or replay:NAME for a recorded GPU "
        "(GEMMSMITH_DEVICE; else the local GPU, else the recorded one).",
        autocompletion=completion.devices,
        show_default=False,
    ),
]
DeviceSlug = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Device model, such as h200; default: the local GPU, else GEMMSMITH_DEFAULT_MODEL.",
        autocompletion=completion.slugs,
        show_default=False,
    ),
]
OnlyDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Only this device model, such as h200.",
        autocompletion=completion.slugs,
        show_default=False,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="GEMMSMITH_URL",
        help="Use this service instead of the local database.",
        show_default=False,
    ),
]
Calls = Annotated[
    int | None,
    typer.Option(
        "--calls",
        metavar="N",
        help="How often you run each problem, per step, per day or in any other period. At equal "
        "priority, the problem that saves most time in all its calls goes first. Counts in a suite "
        "take precedence.",
        show_default=False,
    ),
]
LevelName = Annotated[
    str,
    typer.Option(
        "--level",
        help="core: the curated kernels; full: every legal one.",
        autocompletion=completion.levels,
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Maximum number.")]


def load_settings(**overrides: Any) -> Settings:
    """The settings with the options that were given.

    Raises:
        MisuseError: a value that cannot be used; names the variable.
    """
    from service.settings import Settings, SettingsError

    try:
        return Settings.load(**overrides)
    except SettingsError as error:
        raise MisuseError(str(error)) from error


def problem_of(m: int, n: int, k: int, *, batch: int, dtype: str, layout: str | None) -> Problem:
    """The problem that was asked for; the layout may stand in the dtype, as `bf16.nt`.

    Raises:
        InvalidProblem: names the field and what it accepts.
    """
    from gemmsmith.http import requests

    name, own = named_layout(dtype)
    if own and layout and own != layout.lower():
        raise InvalidProblem("layout", f"the layout of {dtype} is {own}, but --layout is {layout}")
    layout = own or layout or Layout.TN
    return requests.problem_of(m, n, k, batch=batch, dtype=name, layout=layout)


def device_called(name: str, slugs: Iterable[str]) -> str:
    """The slug of the device model that people call by this name, see
    `device.called`.

    Raises:
        CommandError: no such device, or several.
    """
    known = list(dict.fromkeys(slugs))
    fitting = called(name, known)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise CommandError(f"device {name!r} is ambiguous: say {' or '.join(fitting)}")
    raise CommandError(f"no device {name!r}; there is {', '.join(known) or 'none'}")


def typed(problem: Problem) -> str:
    """A problem as a command takes it."""
    batch = f" --batch {problem.batch}" if problem.batch > 1 else ""
    sizes = f"{problem.m} {problem.n} {problem.k}"
    return f"{sizes} --dtype {problem.dtype} --layout {problem.layout}{batch}"


def dtypes_of(names: list[str]) -> list[str]:
    """Element types by name, also comma-separated, each once.

    Raises:
        MisuseError: names what is accepted.
    """
    found: dict[str, None] = {}
    for name in ",".join(names).split(","):
        try:
            found[of_dtype(name.strip()).dtype] = None
        except InvalidProblem as error:
            raise MisuseError(str(error)) from None
    return list(found)


@contextmanager
def connect(url: str, **options: Any) -> Iterator[Client]:
    """A client of the service at `url`.

    Raises:
        MisuseError: not a URL, or not one of a gemmsmith service.
        CommandError: nothing answers there.
    """
    from gemmsmith.http.client import Client

    try:
        client = Client(url, **options)
    except ValueError as error:
        raise MisuseError(str(error)) from error
    with blaming(url), client:
        yield client


@contextmanager
def blaming(url: str) -> Iterator[None]:
    """Within it, failures to reach a service say what is wrong with its URL, where that is it.

    Raises:
        MisuseError, CommandError: as `connect`.
    """
    from gemmsmith.errors import ServiceError, ServiceUnavailable

    try:
        yield
    except ServiceUnavailable as error:
        if _NO_HOST.search(str(error)):
            raise MisuseError(f"the URL {url} is wrong: there is no such host") from error
        if _NO_TLS.search(str(error)):
            plain = url.replace("https:", "http:", 1)
            raise MisuseError(
                f"the URL {url} is wrong: what answers there speaks no TLS; try {plain}"
            ) from error
        if _REFUSED.search(str(error)):
            raise CommandError(
                f"nothing answers at {url}: start a service there with `gemmsmith serve`, or "
                "correct the URL (--url, GEMMSMITH_URL)"
            ) from error
        raise
    except ServiceError as error:
        if 300 <= error.status < 400:
            raise MisuseError(f"the URL {url} is wrong: {error.detail}") from error
        if not error.document.keys() - {"detail"}:
            raise MisuseError(
                f"the URL {url} is wrong: what answers there is no gemmsmith service "
                f"({error.status} {error.title})"
            ) from error
        if (root := _root(url)) != url.rstrip("/") and (error.status, error.title) == _NO_ROUTE:
            raise MisuseError(f"the URL {url} is wrong: the service is at {root}") from error
        raise


def _root(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
