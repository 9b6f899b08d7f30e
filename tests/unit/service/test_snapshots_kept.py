"""Snapshots are kept as they were written: always what the store says, and never written twice."""

from __future__ import annotations

import asyncio
import gzip
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gemmsmith import AsyncClient, Client, Problem, Snapshot, Use
from gemmsmith.core.kernel import Backend
from gemmsmith.http.requests import RUNS
from gemmsmith.signing import Signer
from service import documents
from service.http.turns import OncePerTurn
from service.lookup.abilities import EVERYTHING, Abilities, abilities_of
from service.lookup.devices import Catalogue
from service.lookup.snapshots import KEPT, PacksToRun, Snapshots, WrittenSnapshot
from service.settings import Settings
from tests.compat.test_old_clients import by_library
from tests.support.queries import statements
from tests.support.replacing import replace
from tests.support.serving import ENVIRONMENT, H100, H200, new_settings, promote, winner
from tuner.compile import ArtifactStore
from tuner.errors import StoreError
from tuner.store import Store
from tuner.trial import Winner

SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(32)))
CALLERS = (
    EVERYTHING,
    abilities_of([(b"user-agent", b"gemmsmith-client")]),  # release 0.1
    abilities_of([(b"gemmsmith-runs", b"cutlass3x cublaslt")]),
    abilities_of([(b"gemmsmith-runs", b"")]),
)


def as_it_is(store: Store, device: str, abilities: Abilities) -> Snapshot:
    """The snapshot, written anew from all that is known of each winner."""
    listed = store.winners(device=device)
    told = (abilities.report(each) for each in listed if abilities.knows(each.problem))
    packs = PacksToRun.of(store, believing(store))

    def pack_of(winner: Winner) -> str | None:
        assert winner.candidate is not None
        return packs.of_winner(winner.pack, winner.candidate.kernel.name)

    return documents.snapshot(device, told, pack_of=pack_of, signer=SIGNER)


def believing(store: Store) -> ArtifactStore:
    """Every pack that the store knows is here, and believed for all its kernels."""

    def manifests(*, believed: bool) -> list[tuple[str, SimpleNamespace]]:
        assert believed
        found: dict[str, SimpleNamespace] = {}
        for pack, kernel in store.changes.packed():
            found.setdefault(pack, SimpleNamespace(held=set())).held.add(kernel)
        return [*found.items()]

    return cast(ArtifactStore, SimpleNamespace(manifests=manifests))


def content(written: WrittenSnapshot) -> bytes:
    return b"".join(written.pieces())


def kept(store: Store) -> Snapshots:
    return Snapshots(store, Catalogue(store.devices, None), believing(store), SIGNER)


def drawn(draw: random.Random) -> Winner:
    """Of few problems, so that they come again; and of all kinds."""
    m, dtype = 8 * draw.randrange(1, 6), draw.choice(("bf16", "fp8_e4m3", "int8"))
    problem = Problem(m=m, n=draw.choice((64, 4096)), k=512, dtype=dtype)
    stored = winner(problem, us=draw.uniform(5, 9), device=draw.choice((H200, H200, H100)))
    match draw.randrange(4):
        case 0:
            return replace(stored, candidate=by_library(problem), use=Use.CUBLASLT)
        case 1:
            return replace(stored, candidate=None, use=Use.CUBLAS, statistics=None, speedup=None)
        case 2:
            return replace(stored, replayed=True)
        case _:
            return stored


def change(store: Store, draw: random.Random) -> None:
    """Anything that may become of a store."""
    known = store.winners(device=H200.slug)
    packs = [pack for pack, _ in store.changes.packed()]
    one = draw.choice(known) if known else None
    match draw.randrange(8):
        case 0 | 1 | 2:
            for _ in range(draw.randrange(1, 4)):
                store.promote(drawn(draw))
        case 3 if one is not None and one.candidate is not None:
            pack = f"{draw.getrandbits(256):064x}"
            store.add_pack(pack, "t", [one.candidate.kernel, None], 9)
        case 4 if one is not None and packs:
            store.promote(replace(one, pack=draw.choice(packs)))
        case 5 if packs:
            store.remove_pack(draw.choice(packs))
        case 6 if one is not None and one.revision > 1:
            store.roll_back(one.problem, H200.slug)
        case 7:
            driver = draw.choice((ENVIRONMENT.driver, "999"))
            store.gpus.report(H200, replace(ENVIRONMENT, driver=driver))


def test_it_is_always_what_the_store_says(store: Store) -> None:
    draw = random.Random(1)
    store.promote(winner(Problem(m=1, n=1, k=1), device=H100))
    store.promote(winner(Problem(m=1, n=1, k=1)))
    served, seen = kept(store), dict[tuple[str, Abilities], list[bytes]]()
    for _ in range(20):
        change(store, draw)
        for device, abilities in (
            (device, abilities) for device in (H200.slug, H100.slug) for abilities in CALLERS
        ):
            current = served.current(device, abilities)
            now = content(current)
            assert now == as_it_is(store, device, abilities).document
            assert served.current(device, abilities) is current
            earlier = seen.setdefault((device, abilities), [])
            if not earlier or earlier[-1] != now:
                earlier.append(now)
    assert len(seen[H200.slug, EVERYTHING]) > 8


def test_what_is_told_alike_is_kept_once(store: Store) -> None:
    store.promote(winner(Problem(m=64, n=64, k=64)))
    served = kept(store)
    everything = served.current(H200.slug, EVERYTHING)
    every_backend = " ".join(Backend)
    for runs in (every_backend, f"{every_backend} quantum", every_backend.upper()):
        abilities = abilities_of([(RUNS.lower().encode(), runs.encode())])
        assert served.current(H200.slug, abilities) is everything
    for number in range(100):
        served.current(H200.slug, abilities_of([(b"gemmsmith-runs", b"cute own%d" % number)]))
    assert len(served._kept) == 2
    for number in range(2 * KEPT):
        served.current(f"no-such-device-{number}", EVERYTHING)
    assert len(served._kept) == KEPT


def test_only_what_changed_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [Problem(m=64 * m, n=4096, k=4096) for m in range(1, 40)]
    for problem in problems:
        store.promote(winner(problem))
    served, written = kept(store), 0
    row = documents.row

    def counted(*arguments: Any) -> Any:
        nonlocal written
        written += 1
        return row(*arguments)

    monkeypatch.setattr(documents, "row", counted)
    served.current(H200.slug, EVERYTHING)
    assert written == len(problems)
    with statements("SELECT") as asked:
        for abilities in CALLERS:
            served.current(H200.slug, abilities)
    assert not [each for each in asked if "problems" in each]
    store.promote(winner(problems[3], us=5.0))
    store.promote(winner(problems[7], us=5.0))
    served.current(H200.slug, EVERYTHING)
    assert written == len(problems) + 2
    store.add_pack(
        "0a" * 32, "t", [winner(Problem(m=64, n=64, k=64, dtype="fp16")).candidate.kernel], 9
    )
    served.current(H200.slug, EVERYTHING)
    assert written == len(problems) + 2


def test_a_failed_look_is_made_up_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = winner(Problem(m=64, n=64, k=64))
    store.promote(first)
    served = kept(store)
    served.current(H200.slug, EVERYTHING)
    assert first.candidate is not None
    store.add_pack("0a" * 32, "t", [first.candidate.kernel], 9)
    store.promote(winner(Problem(m=128, n=64, k=64)))
    read = store.served.on
    for whole_reads in range(2):
        left = [read] * whole_reads

        def fails(*arguments: Any, left: list[Any] = left, **options: Any) -> Any:
            if not left:
                raise StoreError("gone")
            return left.pop()(*arguments, **options)

        monkeypatch.setattr(store.served, "on", fails)
        with pytest.raises(StoreError):
            served.current(H200.slug, EVERYTHING)
    monkeypatch.setattr(store.served, "on", read)
    found = content(served.current(H200.slug, EVERYTHING))
    assert found == as_it_is(store, H200.slug, EVERYTHING).document
    assert b"0a" * 32 in found


def test_a_turn_serves_all_who_asked_before_it() -> None:
    begun, go = threading.Semaphore(0), threading.Semaphore(0)
    state, calls = 0, 0

    def look(_: str) -> int:
        nonlocal calls
        calls += 1
        seen = state
        begun.release()
        go.acquire()
        return seen

    async def look_in_thread(question: str) -> int:
        return await asyncio.to_thread(look, question)

    async def test() -> list[int]:
        nonlocal state
        turns = OncePerTurn(look_in_thread)
        first = asyncio.create_task(turns("x"))
        await asyncio.to_thread(begun.acquire)
        state = 1  # after the first look began: whoever asks now must see it
        others = [asyncio.create_task(turns("x")) for _ in range(50)]
        gone = asyncio.create_task(turns("x"))
        await asyncio.sleep(0)
        gone.cancel()
        for _ in range(2):
            go.release()
        return [await first, *[await other for other in others]]

    assert asyncio.run(test()) == [0] + [1] * 50
    assert calls == 2


def test_a_failed_turn_fails_for_all_and_not_for_the_next() -> None:
    answers: list[Any] = [ValueError("gone"), 7]

    async def look(_: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def test() -> list[Any]:
        turns = OncePerTurn(look)
        failed = await asyncio.gather(*(turns("x") for _ in range(5)), return_exceptions=True)
        return [*map(str, failed), await turns("x")]

    assert asyncio.run(test()) == ["gone"] * 5 + [7]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = new_settings(tmp_path / "service")
    promote(settings, *(winner(Problem(m=64 * m, n=4096, k=4096)) for m in range(1, 9)))
    return settings


def test_a_client_of_earlier_releases_gets_the_whole(
    http: httpx.Client, settings: Settings
) -> None:
    """They may ask for what has changed `since` a revision, and do not if no header offers it."""
    before = Snapshot.parse(http.get("/snapshot").content)
    promote(settings, winner(Problem(m=100, n=4096, k=4096)))
    whole = http.get("/snapshot")
    for since in (before.revision, "unknown", Snapshot.parse(whole.content).revision):
        reply = http.get("/snapshot", params={"since": since})
        assert (reply.content, reply.headers["etag"]) == (whole.content, whole.headers["etag"])
        assert "gemmsmith-since" not in reply.headers
    assert http.get("/snapshot", params={"since": "x" * 101}).status_code == 422
    tags = {"If-None-Match": whole.headers["etag"]}
    same = http.get("/snapshot", params={"since": before.revision}, headers=tags)
    assert same.status_code == 304


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        ("gzip", True), ("br, GZIP;q=0.5", True), ("*", True),
        ("identity", False), ("gzip;q=0, br", False), ("gzip; q=0.0", False), ("br", False),
    ],
)  # fmt: skip
def test_it_is_compressed_for_who_takes_it(
    http: httpx.Client, accepted: str, compressed: bool
) -> None:
    with http.stream("GET", "/snapshot", headers={"Accept-Encoding": accepted}) as reply:
        body = b"".join(reply.iter_raw())
    assert ("content-encoding" in reply.headers) is compressed
    assert int(reply.headers["content-length"]) == len(body)
    assert "Accept-Encoding" in reply.headers["vary"]
    whole = http.get("/snapshot", headers={"Accept-Encoding": "identity"}).content
    assert (gzip.decompress(body) if compressed else body) == whole


def test_a_refresh_takes_the_newest(http: httpx.Client, settings: Settings, tmp_path: Path) -> None:
    url = str(http.base_url)
    with Client(url, cache_dir=tmp_path / "cache") as client:
        first = client.snapshot()
        promote(settings, winner(Problem(m=100, n=4096, k=4096)))
        second = client.snapshot(known=first)
        assert second.document == http.get("/snapshot").content != first.document
        assert client.snapshot(known=second) is second

    async def other() -> Snapshot:
        async with AsyncClient(url, cache_dir=tmp_path / "cache") as again:  # knows the second
            await again.snapshot()
            promote(settings, winner(Problem(m=200, n=4096, k=4096)))
            return await again.snapshot()

    assert asyncio.run(other()).document == http.get("/snapshot").content


def test_once_written_it_costs_a_look(http: httpx.Client) -> None:
    tag = http.get("/snapshot").headers["etag"]
    with statements("SELECT") as asked:
        for headers in ({}, {"If-None-Match": tag}, {"Accept-Encoding": "identity"}):
            assert http.get("/snapshot", headers=headers).headers["etag"] == tag
    assert asked
    assert not [each for each in asked if "problems" in each]
    began = time.perf_counter()
    for _ in range(50):
        assert http.get("/snapshot", headers={"If-None-Match": tag}).status_code == 304
    assert (time.perf_counter() - began) / 50 < 0.05  # a few milliseconds
