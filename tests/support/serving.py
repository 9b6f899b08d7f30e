"""The application on a real port with a real database and winners."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import httpx
import uvicorn

from gemmsmith.answers.answer import Correctness, Ratio, Statistics
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from gemmsmith.signing import Signer
from service import identity
from service.http.app import create_app
from service.http.server import server_config
from service.settings import Settings
from tests.support.replacing import replace
from tests.support.sqlite import empty_store
from tuner.backends import kernels
from tuner.compile import ArtifactStore, Pack, Toolchain
from tuner.store import Store, upgrade
from tuner.store.database import create_private, parse_url, sqlite_path
from tuner.store.keys import Scope
from tuner.trial import Phase, Trial, Winner

H200 = DeviceModel(
    name="NVIDIA H200",
    arch="sm90",
    sm_count=132,
    memory_bytes=150 * 10**9,
    l2_bytes=50 * 2**20,
)
H100 = replace(H200, name="NVIDIA H100 PCIe", sm_count=114, memory_bytes=80 * 10**9)
ENVIRONMENT = Environment(
    gpu_uuid="GPU-0",
    driver="580.95",
    cuda="13.0",
    cutlass="4.2.0",
    compiler="V13.0.88",
    torch="2.13.0",
    cublas="13.0",
    gemmsmith="0.1.0",
)


def statistics(median_us: float) -> Statistics:
    return Statistics(
        median_us=median_us, ci_low_us=median_us * 0.99, ci_high_us=median_us * 1.01, samples=25
    )


def winner(
    problem: Problem, *, use: Use = Use.CUTLASS, device: DeviceModel = H200, us: float = 10.0
) -> Winner:
    return Winner(
        problem=problem,
        device=device,
        environment=ENVIRONMENT,
        use=use,
        candidate=Candidate(kernel=kernels(problem)[0], launch=Launch()),
        statistics=statistics(us),
        baseline=statistics(us * 1.1),
        speedup=Ratio(median=1.1, ci_low=1.09, ci_high=1.11),
        correctness=Correctness(error=1e-3, max_error=2e-3, tolerance=1e-2, repeatable=True),
        conditions=None,
    )


def trial(problem: Problem, index: int = 0) -> Trial:
    return Trial(
        problem=problem,
        candidate=Candidate(kernel=kernels(problem)[index], launch=Launch()),
        device=H200,
        environment=ENVIRONMENT,
        phase=Phase.SCREEN,
        statistics=statistics(10.0 + index),
        samples_us=(10.0 + index,),
    )


def new_settings(folder: Path, **values: object) -> Settings:
    """Settings with all files under `folder`, and a new, empty database."""
    settings = Settings.load(
        {},
        **{
            "database": f"sqlite:///{folder}/gemmsmith.db",
            "packs": folder / "packs",
            "winners": folder / "winners",
            "sweeps": folder / "sweeps",
            "signing_key": Path(os.environ["GEMMSMITH_SIGNING_KEY"]),
            "port": 0,
            "events_poll_s": 0.02,
            **values,
        },
    )
    settings.create_folders()
    path = sqlite_path(parse_url(settings.database))
    if path is None or path.exists():
        upgrade(settings.database)
    else:
        create_private(path)
        path.write_bytes(empty_store())
    return settings


def own_signer() -> Signer:
    """The signer of the tests' installation, whose key the tests trust."""
    key = Path(os.environ["GEMMSMITH_SIGNING_KEY"])
    return identity.signer(Settings.load({}, signing_key=key))


def packs_of(settings: Settings) -> ArtifactStore:
    """The folder of packs, to which an installation publishes signed packs."""
    return ArtifactStore(settings.packs, signer=identity.signer(settings))


def publish(
    packs: ArtifactStore, *kernels: AnyKernel, content: bytes = b"\x7fELF not really"
) -> Pack:
    """Publish a pack of these bytes, which are no shared object."""
    toolchain = Toolchain(nvcc=Path("nvcc"), version="13.0.88", origin="wheels")
    with NamedTemporaryFile(suffix=".so") as compiled:
        Path(compiled.name).write_bytes(content)
        return packs.publish(Path(compiled.name), [*kernels], toolchain)


def filled(folder: Path, problem: Problem, **values: object) -> Settings:
    """The settings of a service with something behind every route."""
    settings = new_settings(folder, **values)
    promote(settings, winner(problem, us=200.0), winner(problem, us=190.0))
    with Store.open(settings.database) as store:
        store.add_trials([trial(problem, index) for index in range(3)])
    publish(packs_of(settings), trial(problem).candidate.kernel)
    return settings


def promote(settings: Settings, *winners: Winner) -> None:
    with Store.open(settings.database) as store:
        for item in winners:
            store.promote(item)


def pages(
    client: httpx.Client, href: str | None, name: str, **more: Any
) -> Iterator[list[dict[str, Any]]]:
    """The records of each page of a list, the member `name`, from the first page to the last."""
    while href:
        reply = client.get(href, **more)
        assert reply.status_code == 200, reply.text
        yield reply.json()[name]
        href = reply.json()["links"].get("next", {}).get("href")


@contextmanager
def running(settings: Settings) -> Iterator[httpx.Client]:
    """A client of the application, served by uvicorn from a thread."""
    app = create_app(settings)
    server = uvicorn.Server(
        server_config(app, settings, host="127.0.0.1", port=0, timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield client
    finally:
        state = getattr(app.state, "service", None)
        if state is not None:
            state.stopping.set()
        server.should_exit = True
        thread.join()


@dataclass(frozen=True, kw_only=True)
class Keyed:
    """A service that asks for keys, its database, and the keys by their names."""

    http: httpx.Client
    store: Store
    keys: dict[str, str]

    def ask(self, method: str, path: str, key: str, **more: Any) -> httpx.Response:
        """Send a request with the key of that name, or else with `key` itself."""
        headers = {"Authorization": f"Bearer {self.keys.get(key, key)}", **more.pop("headers", {})}
        return self.http.request(method, path, headers=headers, **more)


@contextmanager
def keyed(settings: Settings, **scopes: Scope) -> Iterator[Keyed]:
    """The application while it is served; it has a key of each name and scope."""
    with Store.open(settings.database) as store:
        keys = {name: store.keys.create(name, scope)[1] for name, scope in scopes.items()}
        with running(settings) as client:
            yield Keyed(http=client, store=store, keys=keys)
