"""`GET /snapshot` and the clients' snapshots of it, over real HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gemmsmith import (
    AsyncClient,
    Client,
    Lookup,
    Packs,
    PackUntrusted,
    Problem,
    Rejected,
    ServiceUnavailable,
    Snapshot,
    Use,
)
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import TileScheduler
from gemmsmith.signing import Signer, Trusted
from service import identity
from service.settings import Settings
from tests.support import fake_nvcc
from tests.support.present import present
from tests.support.replacing import replace
from tests.support.serving import (
    ENVIRONMENT,
    H100,
    H200,
    new_settings,
    packs_of,
    promote,
    running,
    winner,
)
from tuner.backends import launches, offered
from tuner.compile import ArtifactStore, Pack
from tuner.store import Store
from tuner.trial import Winner

KNOWN = Problem(m=4096, n=4096, k=4096)
CUBLAS_WINS = Problem(m=512, n=512, k=8192)
NO_CANDIDATE = Problem(m=1, n=1, k=1)


def splitting(problem: Problem) -> Winner:
    """A winner whose reduction order is scheduled."""
    kernel = next(
        kernel
        for kernel in offered(problem, H200)
        if kernel.scheduler is TileScheduler.STREAM_K and launches(kernel, problem, H200)
    )
    launch = launches(kernel, problem, H200)[0]
    return replace(winner(problem), candidate=Candidate(kernel=kernel, launch=launch))


STREAM_K = splitting(Problem(m=256, n=4096, k=16384))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = new_settings(tmp_path / "service")
    promote(
        settings,
        winner(KNOWN),
        winner(CUBLAS_WINS, use=Use.CUBLAS),
        replace(winner(NO_CANDIDATE, use=Use.CUBLAS), candidate=None),
        STREAM_K,
        winner(KNOWN, device=H100),
    )
    return settings


@pytest.fixture
def client(http: httpx.Client, tmp_path: Path) -> Iterator[Client]:
    with Client(str(http.base_url), cache_dir=tmp_path / "cache", retries=0) as found:
        yield found


def built(settings: Settings, item: Winner, packs: ArtifactStore | None = None) -> Pack:
    """A pack with the winner's kernel; its bytes are no real shared object."""
    assert item.candidate is not None
    folder = settings.packs.parent
    compiled = folder / "unit.so"
    compiled.write_bytes(b"\x7fELF" + item.candidate.kernel.name.encode())
    pack = (packs or packs_of(settings)).publish(
        compiled, [item.candidate.kernel], fake_nvcc.toolchain(folder / "toolchain")
    )
    with Store.open(settings.database) as store:
        store.add_pack(pack.hash, pack.toolchain, [item.candidate.kernel], pack.path.stat().st_size)
    return pack


def test_it_holds_every_winner_of_one_device(client: Client) -> None:
    fetched = client.snapshot(H200.slug)
    assert fetched.device == H200.slug
    rows = {row.problem: row for row in fetched.rows}
    assert set(rows) == {KNOWN, CUBLAS_WINS, NO_CANDIDATE, STREAM_K.problem}
    assert (rows[KNOWN].use, rows[KNOWN].deterministic) == (Use.CUTLASS, True)
    assert rows[KNOWN].saving_us == pytest.approx(0.1 * 10.0)
    assert rows[CUBLAS_WINS].use is Use.CUBLAS
    assert (rows[NO_CANDIDATE].use, rows[NO_CANDIDATE].config) == (Use.CUBLAS, None)
    config = present(rows[STREAM_K.problem].config)
    assert Candidate(kernel=config.kernel, launch=config.launch) == STREAM_K.candidate
    assert not rows[STREAM_K.problem].deterministic
    assert fetched.packs() == ()
    assert [row.problem for row in client.snapshot(H100.slug).rows] == [KNOWN]
    assert client.snapshot(arch="sm90").device in (H100.slug, H200.slug)


def test_it_answers_as_the_service_does(client: Client, settings: Settings) -> None:
    for item in (winner(KNOWN), STREAM_K):
        built(settings, item)
    fetched = client.snapshot(H200.slug)
    asked = [replace(KNOWN, m=m, n=n, k=k) for m in (96, 2048, 5000) for n in (4096, 4100)
             for k in (2048, 8192, 16384)]  # fmt: skip
    asked += [KNOWN, CUBLAS_WINS, replace(CUBLAS_WINS, m=511), STREAM_K.problem]
    chosen = 0
    for problem in asked:
        answer = client.best(problem.m, problem.n, problem.k, device=H200.slug)
        choice = fetched.find(problem)
        if answer.use is Use.CUBLAS:
            assert choice is None
            continue
        assert choice is not None
        assert choice.config == answer.config
        assert (choice.measured, choice.distance) == (answer.measured, answer.distance)
        chosen += 1
    assert chosen == 2  # no neighbour's kernel is run for a plain product


def test_the_revision_follows_the_winners(
    client: Client, http: httpx.Client, settings: Settings
) -> None:
    first = client.snapshot(H200.slug)
    assert client.snapshot(H200.slug, known=first) is first
    reply = http.get("/snapshot", params={"device": H200.slug})
    assert reply.headers["etag"] == f'"{first.tag}"'
    # Clients from before there were signatures name the revision alone.
    for tags in (f'"{first.tag}"', f'"x", W/"{first.tag}"', f'"{first.revision}"'):
        again = http.get("/snapshot", params={"device": H200.slug}, headers={"If-None-Match": tags})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == reply.headers["etag"]
    pack = built(settings, winner(KNOWN))
    second = client.snapshot(H200.slug, known=first)
    assert second.revision != first.revision
    assert second.packs() == (pack.hash,)
    promote(settings, winner(Problem(m=64, n=64, k=64)))
    assert len(client.snapshot(H200.slug, known=second).rows) == len(second.rows) + 1


def test_bad_questions_name_the_field(http: httpx.Client) -> None:
    for query, field in (("device=nope", "device"), ("arch=sm80", "arch"), ("devise=x", "devise")):
        reply = http.get(f"/snapshot?{query}")
        assert reply.status_code == 422
        assert reply.json()["errors"][0]["field"] == field
    described = http.get("/openapi.json").json()["paths"]["/snapshot"]["get"]
    assert {p["name"] for p in described["parameters"]} >= {"device", "arch"}


def test_nothing_tuned_yet_is_not_found(tmp_path: Path) -> None:
    with running(new_settings(tmp_path / "empty")) as http:
        reply = http.get("/snapshot")
        assert reply.status_code == 404
        assert reply.json()["links"]["tune"]["href"] == "/tune"
        with Client(str(http.base_url), cache_dir=None) as client, pytest.raises(Rejected):
            client.snapshot()


def test_the_last_snapshot_stands_in_when_the_service_is_gone(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(settings) as http:
        url = str(http.base_url)
        with Client(url, cache_dir=tmp_path / "cache", retries=0) as client:
            last = client.snapshot(H200.slug)
            lookup = Lookup.of(client, H200.slug, interval=None)
    with (
        Client(url, cache_dir=tmp_path / "cache", retries=0) as client,
        Client(url, cache_dir=None, retries=0) as cold,
        caplog.at_level(logging.WARNING, "gemmsmith"),
    ):
        assert client.snapshot(H200.slug) == last
        assert client.last_from_cache
        assert "serving cached answers" in caplog.text
        with pytest.raises(ServiceUnavailable):
            client.snapshot(H200.slug, known=last)  # who knows one is told
        with pytest.raises(ServiceUnavailable):
            client.snapshot(H100.slug)
        with pytest.raises(ServiceUnavailable):
            cold.snapshot(H200.slug)
    assert not lookup.refresh()  # its client is closed, and the service gone
    assert lookup.snapshot == last


def test_a_lookup_follows_the_service(client: Client, settings: Settings) -> None:
    lookup = Lookup.of(client, H200.slug, interval=None)
    assert not lookup.refresh()
    asked = ("bf16", "tn", KNOWN.m, KNOWN.n, KNOWN.k)
    assert lookup.lookup(*asked) is None  # not compiled
    pack = built(settings, winner(KNOWN))
    assert lookup.refresh()
    choice = present(lookup.lookup(*asked))
    assert choice.config.pack == pack.hash
    packs = Packs.of(client, signed=lambda: lookup.snapshot)
    path = packs.path(pack.hash)
    assert path.read_bytes() == pack.path.read_bytes()
    assert path == client.pack(pack.hash)
    with pytest.raises(PackUntrusted, match="no snapshot here names it"):
        packs.path("0" * 64)


def test_it_is_signed_by_the_installation(client: Client, settings: Settings) -> None:
    fetched = client.snapshot(H200.slug)
    assert fetched.check(identity.trusted(settings)) == identity.signer(settings).public
    assert client.signing_key() == identity.signer(settings).public


def test_a_new_key_signs_the_same_winners_anew(settings: Settings, tmp_path: Path) -> None:
    with running(settings) as http, Client(str(http.base_url), cache_dir=None) as client:
        first = client.snapshot(H200.slug)
    rotated = settings.model_copy(update={"signing_key": tmp_path / "new.key"})
    with running(rotated) as http, Client(str(http.base_url), cache_dir=None) as client:
        second = client.snapshot(H200.slug, known=first)
    assert second.revision == first.revision
    assert second.check(Trusted([identity.signer(rotated).public]))
    assert second != first


@pytest.mark.parametrize("whose", ["nobody's", "a stranger's"])
def test_packs_that_nobody_believed_has_signed_are_not_named(
    settings: Settings, tmp_path: Path, whose: str
) -> None:
    signer = None if whose == "nobody's" else Signer.create(tmp_path / "stranger.key")
    built(settings, winner(KNOWN), ArtifactStore(settings.packs, signer=signer))
    named = []
    for unsigned in (False, True):
        some = settings.model_copy(update={"unsigned": unsigned})
        with running(some) as http, Client(str(http.base_url), cache_dir=None) as client:
            named.append(len(client.snapshot(H200.slug).packs()))
    assert named == [0, 1]


def test_rows_say_the_environment_that_they_were_measured_in(client: Client) -> None:
    rows = client.snapshot(H200.slug).rows
    assert {row.environment for row in rows} == {ENVIRONMENT.digest}


def test_asynchronously(http: httpx.Client, tmp_path: Path) -> None:
    async def test() -> Snapshot:
        async with AsyncClient(str(http.base_url), cache_dir=tmp_path / "cache") as client:
            fetched = await client.snapshot(H200.slug)
            assert await client.snapshot(H200.slug, known=fetched) is fetched
            return fetched

    with Client(str(http.base_url), cache_dir=None) as client:
        assert asyncio.run(test()) == client.snapshot(H200.slug)
