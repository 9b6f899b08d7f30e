"""The checks of `gemmsmith doctor`. A check changes nothing, repairs nothing and never raises."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from gemmsmith.files import unsafe
from gemmsmith.version import VERSION
from tuner import places
from tuner.errors import SchemaOutdated, SchemaTooNew, StoreError, TunerError
from tuner.extras import pip_install

if TYPE_CHECKING:
    from service.settings import Settings

SERVE_BYTES = 100 * 2**20
"""Free disk space that serving needs: the database grows."""
TUNE_BYTES = 5 * 2**30
"""Free disk space that tuning needs: the packs of a suite in three precisions, and the compiler's
temporary files."""


class CheckStatus(StrEnum):
    """The result of a check."""

    OK = "ok"  # usable
    WARNING = "warning"  # usable, but it needs attention
    MISSING = "missing"  # not there, or not valid


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check's result; `fix` says what to do, and is empty if there is nothing to do."""

    name: str
    status: CheckStatus
    detail: str
    fix: str = ""


_Result = tuple[CheckStatus, str, str]
"""The status, the detail and the fix of a check."""


ABILITIES = {
    "serve": ("serve answers", ("files", "cutlass", "disk", "database")),
    "compile": ("compile kernels", ("compiler", "host compiler", "cutlass", "disk")),
    "measure": (
        "tune on a GPU",
        ("gpu", "driver", "compiler", "host compiler", "torch", "cutlass", "disk", "database"),
    ),
    "replay": ("tune on a recorded GPU", ("cutlass", "recordings", "disk", "database")),
}
"""What a machine can do, in words, if none of these checks is MISSING."""


def run(settings: Settings, url: str | None) -> list[Check]:
    """All checks, in the order in which people should read them."""
    checks: Sequence[tuple[str, Callable[[], _Result]]] = (
        ("files", _files),
        ("gpu", _gpu),
        ("driver", _driver),
        ("compiler", _compiler),
        ("host compiler", _host_compiler),
        ("torch", _torch),
        ("cutlass", _cutlass),
        ("plugins", _plugins),
        ("disk", lambda: _disk(settings.packs)),
        ("database", lambda: _database(settings.database)),
        ("recordings", lambda: _recordings(settings.sweeps)),
        ("service", lambda: _service(settings, url)),
    )
    results = []
    for name, check in checks:
        try:
            status, detail, fix = check()
        except Exception as error:  # noqa: BLE001 - the other checks still help
            detail = f"the check itself failed: {type(error).__name__}: {error}"
            status, fix = CheckStatus.MISSING, ""
        results.append(Check(name=name, status=status, detail=detail, fix=fix))
    return results


def abilities(checks: Sequence[Check]) -> dict[str, bool]:
    missing = {check.name for check in checks if check.status is CheckStatus.MISSING}
    return {name: not missing.intersection(needs) for name, (_, needs) in ABILITIES.items()}


def _ok(detail: str) -> _Result:
    return CheckStatus.OK, detail, ""


def _missing(detail: str, fix: str) -> _Result:
    return CheckStatus.MISSING, detail, fix


def _warning(detail: str, fix: str) -> _Result:
    return CheckStatus.WARNING, detail, fix


def _files() -> _Result:
    detail = f"gemmsmith {VERSION} from {places.shipped('')}, its own data in {places.state()}"
    if not places.shipped("migrations/env.py").is_file():
        return _missing(detail, "some that come with gemmsmith are gone: install it again")
    return _ok(detail)


def _gpu() -> _Result:
    from tuner.arch import ARCHITECTURES, MEASURED
    from tuner.devices import local_gpu

    model = local_gpu()
    if model is None:
        return _missing(
            "no usable NVIDIA GPU",
            "nothing to do for serving; to measure, use a machine with an H100 or H200 "
            "(in a container: give it the GPU, e.g. docker run --gpus all)",
        )
    detail = (
        f"{model.name}, {model.arch}, {model.sm_count} SMs, {model.memory_bytes / 2**30:.0f} GiB"
    )
    if model.arch not in MEASURED:
        tuned = "; ".join(f"{name} ({ARCHITECTURES[name].gpus})" for name in MEASURED)
        return _missing(detail, f"kernels are generated for {tuned} only")
    return _ok(detail)


def _driver() -> _Result:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    version = re.search(r"\b(\d{3,})\.\d+(?:\.\d+)?\b", text)
    if version is None:
        return _missing("no NVIDIA driver", "to measure, install driver 580 or newer (CUDA 13)")
    if int(version[1]) < 580:
        return _missing(version[0], "CUDA 13 kernels need driver 580 or newer: upgrade it")
    return _ok(version[0])


def _compiler() -> _Result:
    from tuner.compile import find_toolchain

    try:
        toolchain = find_toolchain()
    except TunerError as error:
        return _missing(
            str(error).splitlines()[0],
            f"{pip_install('compiler')}, or install the CUDA 13 toolkit; needed to compile "
            "kernels, not to serve",
        )
    return _ok(f"nvcc {toolchain.version} ({toolchain.origin}: {toolchain.nvcc})")


def _host_compiler() -> _Result:
    path = shutil.which("g++")
    if path is None:
        return _missing("no g++", "apt-get install g++; nvcc needs it to compile kernels")
    return _ok(path)


def _torch() -> _Result:
    # Its files are read instead of importing it, which takes seconds.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return _missing("not installed", f"{pip_install('gpu')}; needed to measure, not to serve")
    version = importlib.metadata.version("torch")
    written = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    cuda = re.search(r"^cuda\b[^=\n]*= *'([^']+)'", written, re.MULTILINE)
    if cuda is None:
        return _missing(
            f"{version}, built without CUDA",
            "to measure, install a CUDA build: pip install torch --force-reinstall",
        )
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < (2, 9):
        return _missing(version, f"to measure, {pip_install('gpu')}")
    return _ok(f"{version}, CUDA {cuda[1]}")


def _cutlass() -> _Result:
    from tuner.backends.cutlass import package

    try:
        include = package.include_dirs()[0]
    except TunerError as error:
        return _missing(str(error), "pip install nvidia-cutlass==4.2.0.0")
    return _ok(f"{package.version()} ({include})")


def _plugins() -> _Result:
    from tuner.backends.registry import plugins

    known, refused = plugins()
    detail = ", ".join(known) or "no other package adds kernels"
    if refused:
        reasons = "; ".join(f"{place} is left out: {reason}" for place, reason in refused.items())
        return _warning(f"{detail}; {reasons}", "upgrade or uninstall the package")
    return _ok(detail)


def _disk(packs: Path) -> _Result:
    folder = packs.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    detail = f"{free / 2**30:.1f} GiB free at {folder}"
    if not os.access(folder, os.W_OK):
        return _missing(f"{folder} is not writable", "run as its owner, or pass --packs")
    if packs.exists() and (reason := unsafe(packs)):
        return _missing(f"packs are not used: {reason}", "")
    if free < SERVE_BYTES:
        return _missing(detail, "free some space, or pass --packs on another disk")
    if free < TUNE_BYTES:
        return _warning(detail, "a tuned suite takes up to 5 GiB of kernel packs")
    return _ok(detail)


def _database(where: str) -> _Result:
    from service.report import verdict
    from tuner import store

    upgrade = f"gemmsmith db upgrade --database {where}"
    broken = "restore a backup, or name another --database"
    try:
        schema, needed = store.current(where), store.head()
    except StoreError as error:
        return _missing(str(error), broken)
    if schema is None:
        return _warning(f"{where}: not there yet", f"`gemmsmith serve` creates it; or {upgrade}")
    try:
        with store.Store.open(where) as opened:
            winners = opened.counts()["winners"]
            unusable = verdict.other_libraries(opened.overview.algorithms())
    except SchemaOutdated:  # the service migrates it when it starts
        return _warning(f"{where}, schema {schema}, needs {needed}", upgrade)
    except SchemaTooNew as error:
        return _missing(str(error), "upgrade gemmsmith, or name another --database")
    except StoreError as error:
        return _missing(str(error), broken)
    path = store.sqlite_path(store.parse_url(where))
    if path is not None and path.stat().st_mode & 0o077:
        return _warning(f"{where} can be read by others", f"chmod 600 {path}*")
    detail = f"{where}, schema {schema}, {winners} winners"
    if unusable:
        number = sum(unusable.values())
        return _warning(
            f"{detail}, {winners - number} of {winners} usable here: {verdict.why(unusable)}",
            "torch's own operators run; tune these problems again on this machine's GPU",
        )
    return _ok(detail)


def _recordings(folder: Path) -> _Result:
    files = sorted(folder.glob("*.jsonl.zst"))
    if not files:
        return _missing(
            f"no sweep files in {folder.absolute()}",
            "install gemmsmith again, or pass --sweeps; needed to tune without a GPU",
        )
    return _ok(", ".join(path.name for path in files))


def _service(settings: Settings, url: str | None) -> _Result:
    from gemmsmith.errors import ServiceFault, ServiceUnavailable
    from gemmsmith.http.replies import NoAnswer, document
    from gemmsmith.http.sending import ask
    from gemmsmith.http.transport import exposes_key

    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    where = url or f"http://{host}:{settings.port}"
    try:
        reply = ask(where, "/readyz", timeout=2.0)
    except (ValueError, ServiceUnavailable) as error:
        return _warning(str(error), "")
    if isinstance(reply, NoAnswer):
        detail = f"no answer at {where} ({reply.reason})"
        return _warning(detail, "start it: gemmsmith serve")
    try:
        body = document(reply)
        checks = dict(body.get("checks", {}))
    except (ServiceFault, TypeError, ValueError):
        return _warning(f"{where} answers, but not as gemmsmith does: look there", "")
    if reply.status != 200:
        detail = f"{reply.status}, {body.get('detail', 'no reason given')}"
        return _warning(f"{where} is not ready: {detail}", "")
    degraded = [str(said) for said in checks.values() if said != "ok"]
    if degraded:
        return _warning(f"{where} is ready, but {'; '.join(degraded)}", "")
    if exposes_key(where):
        return _warning(
            f"{where} is ready, and the API key goes there unencrypted",
            "outside a trusted network, use HTTPS (docs/access.md)",
        )
    return _ok(f"{where} is ready")
