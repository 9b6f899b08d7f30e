"""Machines that fetch packs from each other's services."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import Result

from gemmsmith.core.problem import Problem
from gemmsmith.http.client import Client
from gemmsmith.signing import Trusted
from service import identity
from service.settings import Settings
from tests.support import fake_nvcc
from tests.support.commands import run
from tests.support.serving import new_settings, packs_of
from tuner.backends import kernels
from tuner.compile import ArtifactStore, Pack, Toolchain
from tuner.compile.fetch import fetch
from tuner.errors import CompilerNotFound

MEMBERS = kernels(Problem(m=64, n=64, k=64))[:8]


@dataclass(kw_only=True)
class Machine:
    """The settings, packs and compiler of a machine."""

    settings: Settings
    toolchain: Toolchain

    @property
    def packs(self) -> ArtifactStore:
        return packs_of(self.settings)

    @property
    def trusted(self) -> Trusted:
        return identity.trusted(self.settings)

    def publish(self, *members: int, toolchain: Toolchain | None = None) -> Pack:
        """Publish these kernels as if they had been compiled here; the bytes are invented."""
        compiled = self.settings.packs.parent / "unit.so"
        held = [MEMBERS[member] for member in members]
        names = b"".join(kernel.name.encode() + b"\0" for kernel in held)
        compiled.write_bytes(names + os.urandom(10_000 - len(names)))
        return self.packs.publish(compiled, held, toolchain or self.toolchain)

    def files(self) -> set[str]:
        return {path.name for path in self.settings.packs.iterdir()}


def machine(folder: Path) -> Machine:
    """A machine with its own key, which no other machine trusts."""
    folder.mkdir()
    keys = {"signing_key": folder / "signing.key", "trusted": folder / "trusted"}
    return Machine(
        settings=new_settings(folder, **keys), toolchain=fake_nvcc.toolchain(folder / "toolchain")
    )


def compile_(*arguments: object, code: int = 0) -> Result:
    return run("compile", "--winners", *arguments, code=code)


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> Toolchain:
        raise CompilerNotFound("no nvcc ≥ 12.8. Install one.")

    monkeypatch.setattr("service.worker.builder.find_toolchain", nothing)


def document(result: Result) -> Any:
    """The output of `--json`, without the log of the service, which runs in this process."""
    return json.loads(result.stdout[result.stdout.index("{\n") :])


class Meddling(httpx.BaseTransport):
    """A network that may change or break replies."""

    def __init__(self, meddle: Callable[[httpx.Request, bytes], bytes]) -> None:
        self._network = httpx.HTTPTransport()
        self._meddle = meddle

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._network.handle_request(request)
        content = self._meddle(request, response.read())
        response.close()
        return httpx.Response(response.status_code, content=content)

    def close(self) -> None:
        self._network.close()


def taking(url: str, here: Machine, meddle: Callable[[httpx.Request, bytes], bytes]) -> list[str]:
    """Fetch MEMBERS 0 … 3 while `meddle` changes replies. Returns their hashes, "" for failures."""
    with Client(url, cache_dir=None, retries=0, transport=Meddling(meddle)) as client:
        digest = here.toolchain.digest
        fetched = fetch(client, here.packs, MEMBERS[:4], toolchain=digest, trusted=here.trusted)
        return [item.pack.hash if item.pack else "" for item in fetched]
