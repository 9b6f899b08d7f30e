"""`GET /packs`: what packs there are, page by page."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gemmsmith import AsyncClient, Client
from gemmsmith.core.problem import Problem
from gemmsmith.http.replies import SCHEMA
from gemmsmith.signing import Signer
from service import identity
from service.settings import Settings
from tests.support.replacing import replace
from tests.support.serving import new_settings, packs_of, pages, running
from tuner.backends import kernels
from tuner.backends.unit import kernel_digest
from tuner.compile import ArtifactStore, Manifest, Pack, Toolchain
from tuner.store import Store

MEMBERS = kernels(Problem(m=64, n=64, k=64))[:7]
EMPTY = {"schema": SCHEMA, "packs": [], "links": {}}
OLDER = Toolchain(nvcc=Path("nvcc"), version="13.0.88", origin="wheels", cutlass="4.2.0.0")
NEWER = replace(OLDER, version="13.1.1")


def publish(settings: Settings, toolchain: Toolchain, *members: int) -> Pack:
    compiled = settings.packs.parent / "unit.so"
    compiled.write_bytes(f"\x7fELF {toolchain.version} {members}".encode())
    store = packs_of(settings)
    return store.publish(compiled, [MEMBERS[member] for member in members], toolchain)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return new_settings(tmp_path)


def test_an_empty_folder_is_an_empty_page(http: httpx.Client, settings: Settings) -> None:
    assert http.get("/packs").json() == EMPTY
    settings.packs.rmdir()
    assert http.get("/packs").json() == EMPTY


def test_a_pack_is_listed_with_its_manifest(http: httpx.Client, settings: Settings) -> None:
    pack = publish(settings, OLDER, 0, 1)
    (entry,) = http.get("/packs").json()["packs"]
    manifest = msgspec.convert(entry, Manifest)
    assert manifest.check(pack.hash, identity.trusted(settings)) == identity.signer(settings).public
    assert entry.pop("signature")["key"] == identity.signer(settings).public.id
    created_at = entry.pop("created_at")
    assert created_at.startswith("20")
    assert entry == {
        "hash": pack.hash,
        "bytes": pack.path.stat().st_size,
        "toolchain": OLDER.digest,
        "nvcc": "13.0.88",
        "cutlass": "4.2.0.0",
        "kernels": [MEMBERS[0].name, MEMBERS[1].name],
        "digests": [kernel_digest(MEMBERS[0]), kernel_digest(MEMBERS[1])],
        "links": {"self": {"href": f"/packs/{pack.hash}"}},
    }
    assert http.get(entry["links"]["self"]["href"]).content == pack.path.read_bytes()


def test_page_by_page_every_pack_once(http: httpx.Client, settings: Settings) -> None:
    hashes = sorted(publish(settings, OLDER, member).hash for member in range(7))
    found = list(pages(http, "/packs?limit=3", "packs"))
    assert [len(page) for page in found] == [3, 3, 1]
    assert [entry["hash"] for page in found for entry in page] == hashes


def test_a_toolchain_chooses(http: httpx.Client, settings: Settings) -> None:
    older = {publish(settings, OLDER, member).hash for member in range(3)}
    newer = {publish(settings, NEWER, member).hash for member in range(2)}
    for toolchain, hashes in ((OLDER, older), (NEWER, newer)):
        found = list(pages(http, f"/packs?toolchain={toolchain.digest}&limit=2", "packs"))
        assert {entry["hash"] for page in found for entry in page} == hashes
    assert http.get(f"/packs?toolchain={'0' * 64}").json()["packs"] == []


def test_a_cursor_means_its_place_when_its_pack_is_gone(
    http: httpx.Client, settings: Settings
) -> None:
    packs = sorted((publish(settings, OLDER, member) for member in range(5)), key=lambda p: p.hash)
    listing = pages(http, "/packs?limit=2", "packs")
    next(listing)
    packs[1].path.with_suffix(".json").unlink()
    packs[1].path.unlink()
    assert [entry["hash"] for page in listing for entry in page] == [p.hash for p in packs[2:]]
    assert http.get(f"/packs?after={'f' * 64}").json() == EMPTY


def test_what_cannot_be_fetched_is_not_listed(http: httpx.Client, settings: Settings) -> None:
    packs = [publish(settings, OLDER, member) for member in range(3)]
    assert http.get(f"/packs/{packs[1].hash}").status_code == 200
    packs[0].path.unlink()
    packs[1].path.write_bytes(b"\x7fELF")
    assert [entry["hash"] for entry in http.get("/packs").json()["packs"]] == [packs[2].hash]
    assert [http.get(f"/packs/{pack.hash}").status_code for pack in packs] == [404, 404, 200]


def not_believed(settings: Settings) -> list[Pack]:
    """Packs without a signature, with a stranger's, and with an altered manifest."""
    compiled, packs = settings.packs.parent / "unit.so", []
    stranger = Signer.create(settings.packs.parent / "stranger.key")
    for signer in (None, stranger, identity.signer(settings)):
        compiled.write_bytes(f"\x7fELF {len(packs)}".encode())
        store = ArtifactStore(settings.packs, signer=signer)
        packs.append(store.publish(compiled, [MEMBERS[6]], OLDER))
    manifest = packs[2].path.with_suffix(".json")
    manifest.write_bytes(manifest.read_bytes().replace(b"13.0.88", b"13.0.99"))
    return packs


def test_only_packs_with_a_trusted_signature_are_listed_and_served(
    http: httpx.Client, settings: Settings
) -> None:
    served = sorted(publish(settings, OLDER, member).hash for member in range(3))
    others = not_believed(settings)
    for query in ("", "?limit=2", f"?toolchain={OLDER.digest}&limit=1"):
        listed = pages(http, f"/packs{query}", "packs")
        assert [entry["hash"] for page in listed for entry in page] == served, query
    with Store.open(settings.database) as store:
        for pack in others:
            store.add_pack(pack.hash, OLDER.digest, [MEMBERS[6]], 10)
    assert http.get(f"/kernels/{MEMBERS[6].name}").json()["pack"] is None
    for pack in others:
        for headers in ({}, {"Range": "bytes=0-3"}, {"If-None-Match": f'"{pack.hash}"'}):
            reply = http.get(f"/packs/{pack.hash}", headers=headers)
            assert reply.status_code == 404
            assert "has no trusted signature" in reply.json()["detail"]
            assert http.head(f"/packs/{pack.hash}", headers=headers).status_code == 404
    assert all(http.get(f"/packs/{pack_hash}").status_code == 200 for pack_hash in served)
    # What is signed from now on is served from now on.
    ArtifactStore(settings.packs).sign(identity.signer(settings))
    assert http.get(f"/packs/{others[0].hash}").status_code == 200


def test_a_service_that_accepts_unsigned_packs_serves_them(tmp_path: Path) -> None:
    settings = new_settings(tmp_path, unsigned=True)
    accepted = {pack.hash for pack in not_believed(settings)[:2]}
    with running(settings) as http:
        listed = {entry["hash"] for entry in http.get("/packs").json()["packs"]}
        assert listed >= accepted
        assert all(http.get(f"/packs/{pack_hash}").status_code == 200 for pack_hash in accepted)


@pytest.mark.parametrize("field", ["toolchain", "after"])
@pytest.mark.parametrize("value", ["", "none", "A" * 64, "0" * 63, "0" * 65, "%0a" + "0" * 63])
def test_anything_but_a_hash_is_refused(http: httpx.Client, field: str, value: str) -> None:
    reply = http.get(f"/packs?{field}={value}")
    assert reply.status_code == 422
    (error,) = reply.json()["errors"]
    assert error["field"] == field
    assert error["accepted"] == "64 hexadecimal digits in lower case"


def test_limits_and_unknown_fields_are_refused_as_everywhere(http: httpx.Client) -> None:
    for query in ("limit=0", "limit=1001", "toolchains=x"):
        assert http.get(f"/packs?{query}").status_code == 422


def test_the_listing_is_described(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()["paths"]["/packs"]["get"]
    assert {field["name"] for field in described["parameters"]} == {"toolchain", "after", "limit"}
    assert http.get(http.get("/").json()["links"]["packs"]["href"]).status_code == 200


def test_the_clients_go_through_all_pages(
    http: httpx.Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmsmith.http.listing.PAGE", 2)
    hashes = sorted(publish(settings, OLDER, member).hash for member in range(5))
    publish(settings, NEWER, 5)
    url = str(http.base_url)
    with Client(url, cache_dir=None) as client:
        assert [entry["hash"] for entry in client.packs(toolchain=OLDER.digest)] == hashes
        assert len(list(client.packs())) == 6
        assert len(list(client.packs(limit=3))) == 3

    async def asynchronously() -> list[str]:
        async with AsyncClient(url, cache_dir=None) as client:
            return [entry["hash"] async for entry in client.packs(toolchain=OLDER.digest)]

    assert asyncio.run(asynchronously()) == hashes


def test_who_has_a_pack_or_wants_a_part_is_answered_without_reading_all(
    http: httpx.Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = publish(settings, OLDER, 0)
    whole, where = pack.path.read_bytes(), f"/packs/{pack.hash}"
    reply = http.get(where)
    assert hashlib.sha256(reply.content).hexdigest() == pack.hash
    assert (reply.content, reply.headers["etag"]) == (whole, f'"{pack.hash}"')
    assert "immutable" in reply.headers["cache-control"]
    hashed = []
    file_digest = hashlib.file_digest

    def counted(*args: Any) -> Any:
        hashed.append(args)
        return file_digest(*args)

    monkeypatch.setattr("tuner.compile.artifacts.hashlib.file_digest", counted)
    for tags in (f'"{pack.hash}"', f'W/"{pack.hash}", "x"', "*"):
        reply = http.get(where, headers={"If-None-Match": tags})
        assert (reply.status_code, reply.content) == (304, b"")
        assert reply.headers["etag"] == f'"{pack.hash}"'
        assert "immutable" in reply.headers["cache-control"]
    for asked, start, stop in (
        ("0-3", 0, 4),
        ("5-", 5, None),
        ("-6", -6, None),
        ("2-999", 2, None),
    ):
        part = http.get(where, headers={"Range": f"bytes={asked}"})
        assert (part.status_code, part.content) == (206, whole[start:stop]), asked
        assert part.headers["content-range"].endswith(f"/{len(whole)}")
    assert hashed == []
    http.get(where)
    http.get(where, headers={"If-None-Match": '"other"'})
    assert len(hashed) == 2


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ("bytes=0-0,2-3", 200),
        ("bytes=5-2", 200),
        ("lines=1-2", 200),
        ("bytes=", 200),
        ("bytes=--1", 200),
        (f"bytes={'9' * 5000}-", 200),
        ("bytes=999999-", 416),
        ("bytes=-0", 416),
    ],
)
def test_odd_ranges(http: httpx.Client, settings: Settings, asked: str, status: int) -> None:
    pack = publish(settings, OLDER, 0)
    size = pack.path.stat().st_size
    reply = http.get(f"/packs/{pack.hash}", headers={"Range": asked})
    assert reply.status_code == status
    if status == 200:
        assert reply.content == pack.path.read_bytes()
    else:
        assert reply.headers["content-range"] == f"bytes */{size}"
        assert reply.json()["type"].endswith("range-not-satisfiable")
