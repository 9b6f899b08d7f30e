"""Fixtures that several parts share."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import site
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import postgresql
from tests.support.sqlite import empty_store
from tuner.store import Store, upgrade

# Containers like to forbid byte code. Hundreds of processes are started here: each would compile
# the whole project for itself, a second of a core.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Products of a few rows gain nothing by torch's second thread, and where several processes share
# the cores its barriers spin: the same tests then take five times the processor.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Whoever starts this in the background may have had Ctrl-C ignored. What tests start and interrupt
# inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_OF_TESTS = ("TEST_", "FAULT_", "FUZZ_", "GPU_", "MALFORMED", "COMPILE_JOBS", "COMMIT")
"""How the variables begin, behind `GEMMSMITH_`, that are for tests and not for an installation."""


def _live_alone() -> None:
    """Give these tests a home of their own, and none of this user's settings, keys and services.

    The checkout may be in use meanwhile: its database and the usual port are not these tests'.
    """
    home = os.environ.get("GEMMSMITH_TEST_HOME")
    if home is None:  # else another process of this session has made it
        home = os.environ["GEMMSMITH_TEST_HOME"] = tempfile.mkdtemp(prefix="gemmsmith-tests-")
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        # What belongs to Python and git, wherever home is.
        os.environ.setdefault("PYTHONUSERBASE", site.getuserbase())
        if (settings := Path.home() / ".gitconfig").is_file():
            os.environ.setdefault("GIT_CONFIG_GLOBAL", str(settings))
    for name in list(os.environ):
        word = name.removeprefix("GEMMSMITH_")
        if name.startswith(("GEMMSMITH", "XDG_")) and not word.startswith(_OF_TESTS):
            del os.environ[name]
    own = tempfile.mkdtemp(dir=home)
    os.environ.update(
        HOME=own,
        GEMMSMITH_DATABASE=f"sqlite:///{own}/gemmsmith.db",
        GEMMSMITH_PACKS=f"{own}/packs",
        GEMMSMITH_PORT="0",
        GEMMSMITH_SIGNING_KEY=f"{own}/trusted/signing.key",
        GEMMSMITH_TRUSTED=f"{own}/trusted",
        # A new database has no winners, but where a test says which.
        GEMMSMITH_WINNERS=f"{own}/no-winners",
    )


_live_alone()

DATABASES = [
    "sqlite",
    pytest.param("postgresql", marks=pytest.mark.postgresql),
]


LONGEST_FIRST = ("faults", "integration", "migration", "unit")
"""In parallel: the files at the end take seconds, so that no process has long to wait for another.
"""


def pytest_configure(config: pytest.Config) -> None:
    """Files are handed out in the order of their tests, not of how many they have."""
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        # An example takes as long as the machine's other work lets it, and leaves nothing behind.
        settings.register_profile("shared", deadline=None, database=None)
        settings.load_profile("shared")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected lives to the end: Python does not search it for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One process alone keeps the usual order: unit tests tell the most in the least time."""
    if not hasattr(config, "workerinput"):
        return

    def place(item: pytest.Item) -> int:
        part = item.path.relative_to(Path(__file__).parent).parts[0]
        return LONGEST_FIRST.index(part) if part in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """What a command sets up for the logs of its process is gone after the test that ran it."""
    yield
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    # Exactly this type: pytest's own handlers are subclasses.
    root.handlers = [one for one in root.handlers if type(one) is not logging.StreamHandler]


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """URL of a PostgreSQL server that lives as long as the tests; ends with no database's name."""
    binaries = postgresql.programs()
    if binaries is None:
        pytest.skip("PostgreSQL's server programs are missing: apt-get install postgresql")
    with postgresql.running(binaries) as url:
        yield url


@pytest.fixture(scope="session")
def postgresql_template(postgresql_server: str) -> str:
    """Name of a migrated database to copy from: quicker than migrating one for every test."""
    _create_database(postgresql_server, "gemmsmith_template")
    upgrade(f"{postgresql_server}/gemmsmith_template")
    return "gemmsmith_template"


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy from."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    path.write_bytes(empty_store())
    return path


@pytest.fixture(params=DATABASES)
def database_kind(request: pytest.FixtureRequest) -> str:
    """Every test that asks for a database runs on each kind."""
    return str(request.param)


@pytest.fixture
def empty_database_url(
    database_kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[str]:
    """A database with no tables in it."""
    if database_kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    server = request.getfixturevalue("postgresql_server")
    name = f"empty_{uuid.uuid4().hex}"
    _create_database(server, name)
    yield f"{server}/{name}"
    _drop_database(server, name)


@pytest.fixture
def store_url(database_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty store at the newest schema."""
    if database_kind == "sqlite":
        path = tmp_path / "store.db"
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite:///{path}"
        return
    server = request.getfixturevalue("postgresql_server")
    name = f"store_{uuid.uuid4().hex}"
    _create_database(server, name, request.getfixturevalue("postgresql_template"))
    yield f"{server}/{name}"
    _drop_database(server, name)


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """An open, empty store, on each kind of database."""
    with Store.open(store_url) as opened:
        yield opened


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """An empty store at the newest schema, for tests where the kind of database is no matter."""
    path = tmp_path / "sqlite-store.db"
    shutil.copy(sqlite_template, path)
    return f"sqlite:///{path}"


def _create_database(server: str, name: str, template: str = "template1") -> None:
    postgresql.administer(server, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')


def _drop_database(server: str, name: str) -> None:
    postgresql.administer(server, f'DROP DATABASE "{name}" WITH (FORCE)')
