"""Rows of the own database are trusted as they are read; `doctor --deep` checks all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update
from typer.testing import CliRunner, Result

from gemmsmith.core.problem import Problem
from gemmsmith.signing import Signer
from service.cli.main import app
from service.settings import Settings
from tests.support.present import present
from tests.support.serving import H200, new_settings, promote, publish, running, winner
from tuner.compile import ArtifactStore
from tuner.store import Store
from tuner.store.models import KernelRow, WinnerRow
from tuner.store.statement import signed

KNOWN = Problem(m=4096, n=4096, k=4096)
NEAR = Problem(m=2048, n=4096, k=4096)
FAR = Problem(m=64, n=256, k=512)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = new_settings(tmp_path)
    promote(made, winner(KNOWN), winner(FAR))
    return made


@pytest.fixture
def client(settings: Settings) -> Iterator[httpx.Client]:
    with running(settings) as opened:
        yield opened


def alter(settings: Settings, **values: object) -> None:
    """As somebody would who may write to the database, but is not this program."""
    with Store.open(settings.database) as store, store.database.write() as session:
        first = select(WinnerRow.id).order_by(WinnerRow.id).limit(1).scalar_subquery()
        session.execute(update(WinnerRow).where(WinnerRow.id == first).values(**values))


def best(client: httpx.Client, problem: Problem = KNOWN, **more: Any) -> httpx.Response:
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k, "device": H200.slug}
    return client.get("/best", params=sizes | more)


def test_a_lookup_trusts_the_row_and_a_deep_look_does_not(
    settings: Settings, client: httpx.Client
) -> None:
    alter(settings, use="cublas")
    answer = best(client).json()
    assert (answer["match"], answer["use"]) == ("exact", "cublas")
    assert best(client, NEAR).json()["match"] == "nearest"
    deep = doctor(settings, "--deep")
    assert deep.exit_code == 1
    assert f"winner {KNOWN} on {H200.slug}, revision 1: it was altered" in deep.stdout


def test_a_row_that_cannot_be_read_is_no_winner(settings: Settings, client: httpx.Client) -> None:
    alter(settings, record={})
    assert best(client).json()["match"] == "predicted"
    assert best(client, exact=True).status_code == 404
    deep = doctor(settings, "--deep")
    assert deep.exit_code == 1
    assert f"winner {KNOWN} on {H200.slug}, revision 1: it was altered" in deep.stdout


def test_a_description_that_was_put_right_is_answered_with_by_a_running_service(
    settings: Settings,
) -> None:
    candidate = present(winner(KNOWN).candidate)
    kernel = candidate.kernel
    with Store.open(settings.database) as store:
        with store.database.write() as session:
            row = present(session.scalars(select(KernelRow)).first())
            row.description = {**row.description, "alignment_d": 1}
        with running(settings) as client:
            assert best(client).json()["config"]["kernel"]["alignment_d"] == 1
            store.imports.take([], [kernel], unsigned=False)
            client.post("/winners/pin", json={"m": 4096, "n": 4096, "k": 4096, "revision": 1})
            right = best(client).json()["config"]["kernel"]["alignment_d"]
    assert right == kernel.alignment_d != 1


def doctor(settings: Settings, *arguments: str) -> Result:
    environ = settings.environment()
    said = ["doctor", "--url", "http://127.0.0.1:9", *arguments]
    return CliRunner(env=environ).invoke(app, said)


def test_a_deep_look_finds_nothing_wrong_with_what_is_whole(settings: Settings) -> None:
    report = doctor(settings, "--deep", "--json")
    assert (report.exit_code, json.loads(report.stdout)["wrong"]) == (0, [])


def test_a_deep_look_finds_all_that_is_wrong(settings: Settings, tmp_path: Path) -> None:
    signer = Signer.create(tmp_path / "theirs.key")
    settings.trusted.mkdir(parents=True, exist_ok=True)
    theirs = settings.trusted / "theirs.pub"
    theirs.write_text(signer.public.line)
    candidate = present(winner(KNOWN).candidate)
    packs = ArtifactStore(settings.packs)
    pack = publish(packs, candidate.kernel)
    nobodys = publish(packs, candidate.kernel, content=b"\x7fELF of nobody")
    with Store.open(settings.database) as store:
        kept = store.promote(signed(winner(NEAR), signer))
        with store.database.write() as session:
            last = present(session.scalars(select(WinnerRow).order_by(WinnerRow.id.desc())).first())
            last.signature = {"key": signer.public.id, "value": "A" * 86 + "==", "pack": None}
            kernel = present(session.scalars(select(KernelRow)).first())
            kernel.description = {**kernel.description, "tile": [0, 0, 0]}
    pack.path.write_bytes(b"\x7fELF another program")
    try:
        report = doctor(settings, "--deep")
    finally:
        theirs.unlink()
    assert report.exit_code == 1
    wrong = [line for line in report.stdout.splitlines() if line.startswith("wrong")]
    name = candidate.kernel.name
    for said in (
        f"winner {KNOWN} on {H200.slug}, revision 1: it was altered in the database",
        f"kernel {name}: no kernel has such a tile",
        f"pack {pack.path}: its bytes have the SHA-256",
        f"pack {nobodys.path}: it is not signed",
    ):
        assert any(said in line for line in wrong), wrong
    assert pack.path.exists()  # it looks, and repairs nothing
    assert kept.signature is not None
    assert doctor(settings).exit_code == 0
