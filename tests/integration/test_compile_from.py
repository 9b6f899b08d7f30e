"""`gemmsmith compile --from`: packs come from a real service; what it lacks is compiled here."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from gemmsmith.errors import PackCorrupt, ServiceFault, ServiceUnavailable
from gemmsmith.http.client import Client
from tests.support import fake_nvcc
from tests.support.machines import (
    MEMBERS,
    Machine,
    Meddling,
    compile_,
    document,
    no_compiler,
    taking,
)
from tests.support.replacing import replace
from tests.support.serving import running
from tuner.backends.unit import kernel_digest
from tuner.compile import Manifest, Pack
from tuner.compile.fetch import fetch
from tuner.store import Store


def tampered(pack: Pack) -> Callable[[httpx.Request, bytes], bytes]:
    def meddle(request: httpx.Request, content: bytes) -> bytes:
        bad = content[:-1] + bytes([content[-1] ^ 1])
        return bad if request.url.path.endswith(pack.hash) else content

    return meddle


def test_what_the_service_has_is_fetched_and_the_rest_compiled(
    here: Machine, there: Machine, url: str
) -> None:
    both = there.publish(5, 0, 1)
    single = there.publish(2)
    there.publish(6)  # nobody here wants it
    result = compile_("--from", url)
    assert (
        "3 fetched, 1 compiled, 0 compiled before, 0 failed, of 4 kernels, in 3 packs"
        in result.stdout
    )
    assert f"3 kernels fetched from {url}" in result.stderr
    assert fake_nvcc.calls(here.settings.packs.parent / "toolchain") == 1
    for pack in (both, single):
        taken = here.packs.get(pack.hash)
        assert taken is not None
        assert taken.path.read_bytes() == pack.path.read_bytes()
    manifests = dict(here.packs.manifests())
    theirs = dict(there.packs.manifests())
    for pack, held in ((both, MEMBERS[:2]), (single, MEMBERS[2:3])):
        manifest = manifests[pack.hash]
        assert manifest.statement(pack.hash) == theirs[pack.hash].statement(pack.hash)
        assert manifest.signature == theirs[pack.hash].signature
        assert manifest.taken == sorted(map(kernel_digest, held))
    assert here.packs.find(MEMBERS[5]) is None  # it came along, and nobody asked for it
    with Store.open(here.settings.database) as store:
        assert store.pack_for(MEMBERS[0].name) == both.hash
        assert store.pack_for(MEMBERS[1].name) == both.hash
        assert store.pack_for(MEMBERS[2].name) == single.hash
        assert store.pack_for(MEMBERS[3].name) is not None
        assert store.pack_for(MEMBERS[5].name) is None


def test_what_is_here_needs_no_service(here: Machine, there: Machine) -> None:
    there.publish(0, 1, 2, 3)
    with running(there.settings) as http:
        url = str(http.base_url)
        compile_("--from", url)
    found = document(compile_("--from", url, "--json"))
    assert found["counts"] == {
        "wanted": 4, "fetched": 0, "compiled": 0, "cached": 4, "failed": 0, "packs": 1,
    }  # fmt: skip
    assert found["refused"] == []


def test_packs_of_another_compiler_are_left_alone(here: Machine, there: Machine, url: str) -> None:
    newer = replace(there.toolchain, version="13.1.1")
    pack = there.publish(0, 1, 2, 3, toolchain=newer)
    counts = document(compile_("--from", url, "--json"))["counts"]
    assert (counts["fetched"], counts["compiled"]) == (0, 4)
    assert here.packs.get(pack.hash) is None


def test_without_a_compiler_any_pack_will_do(
    here: Machine, there: Machine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_compiler(monkeypatch)
    there.publish(0, 1)
    newest = there.publish(1, toolchain=replace(there.toolchain, version="13.1.1"))
    other = there.publish(2)
    result = compile_("--from", url, "--json", code=1)
    found = document(result)
    assert found["counts"]["fetched"] == 3
    assert found["kernels"][MEMBERS[1].name] == newest.hash
    assert found["kernels"][MEMBERS[2].name] == other.hash
    (failure,) = found["failures"]
    assert failure["kernel"] == MEMBERS[3].name
    assert "in no pack here or at the service" in failure["message"]
    assert "no nvcc" in failure["message"]
    with Store.open(here.settings.database) as store:
        assert store.pack_for(MEMBERS[1].name) == newest.hash
    there.publish(3)
    assert "1 fetched, 0 compiled, 3 compiled before, 0 failed" in compile_("--from", url).stdout


def test_without_a_compiler_and_a_service_it_fails_as_ever(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_compiler(monkeypatch)
    assert compile_(code=1).stderr == "error: no nvcc ≥ 12.8. Install one.\n"


def test_a_service_that_is_away_is_one_line_and_nothing_is_written(here: Machine) -> None:
    result = compile_("--from", "http://127.0.0.1:9", code=1)
    assert result.stderr.splitlines()[-1].startswith("error: nothing answers at http://127.0.0.1:9")
    assert result.stdout == ""
    assert here.files() == set()
    for wrong in ("localhost", ""):
        result = compile_("--from", wrong, code=2)
        assert result.stderr.startswith("error: the service's URL must be like")


def test_tampered_bytes_are_refused_by_name_and_the_kernel_is_compiled(
    here: Machine, there: Machine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = there.publish(0, 1), there.publish(2, 3)

    def connect(url: str, **options: object) -> Client:
        return Client(url, transport=Meddling(tampered(bad)), **options)  # type: ignore[arg-type]

    monkeypatch.setattr("service.cli.compiling.connect", connect)
    result = compile_("--from", url, "--json")
    found = document(result)
    assert (found["counts"]["fetched"], found["counts"]["compiled"]) == (2, 2)
    (refused,) = found["refused"]
    assert bad.hash in refused
    assert f"refused: pack {bad.hash}" in result.stderr
    assert here.packs.get(bad.hash) is None
    assert here.packs.get(good.hash) is not None


def test_an_older_pack_stands_in_for_a_refused_one(here: Machine, there: Machine, url: str) -> None:
    older = there.publish(0, 1, 2, 3)
    newer = there.publish(0, 1, 2, 3)
    assert taking(url, here, tampered(newer)) == [older.hash] * 4


def test_a_pack_evicted_meanwhile_is_passed_over(here: Machine, there: Machine, url: str) -> None:
    older, newer = there.publish(0, 1), there.publish(0, 1, 2)

    def evict(request: httpx.Request, content: bytes) -> bytes:
        if request.url.path == "/packs":
            newer.path.with_suffix(".json").unlink()
            newer.path.unlink()
        return content

    assert taking(url, here, evict) == [older.hash, older.hash, "", ""]


def test_a_service_that_dies_on_the_way_leaves_whole_packs(
    here: Machine, there: Machine, url: str
) -> None:
    packs = [there.publish(member) for member in range(4)]
    served: list[str] = []

    def dies(request: httpx.Request, content: bytes) -> bytes:
        served.append(request.url.path)
        if len(served) == 4:
            raise httpx.ReadError("connection reset")
        return content

    with pytest.raises(ServiceUnavailable, match="connection reset"):
        taking(url, here, dies)
    whole = {pack.hash for pack in packs[:2]}
    assert here.files() == {f"{name}.{suffix}" for name in whole for suffix in ("so", "json")}
    assert {pack.hash for pack in here.packs.packs()} == whole


def test_a_service_that_accepts_and_says_nothing_is_given_up_on(here: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            Client(url, cache_dir=None, retries=0, timeout=0.2) as client,
            pytest.raises(ServiceUnavailable, match=url),
        ):
            list(fetch(client, here.packs, MEMBERS, toolchain=None, trusted=None))
    assert here.files() == set()


@pytest.mark.parametrize(
    "change",
    [
        {"hash": "../../etc/passwd"},
        {"hash": None},
        {"kernels": [MEMBERS[0].name]},
        {"digests": "none"},
        {"bytes": "many"},
    ],
)
def test_a_listing_that_makes_no_sense_is_an_error(
    here: Machine, there: Machine, url: str, change: dict[str, object]
) -> None:
    there.publish(0, 1)

    def meddle(_request: httpx.Request, content: bytes) -> bytes:
        page = json.loads(content)
        page["packs"][0] |= change
        return json.dumps(page).encode()

    with pytest.raises(ServiceFault, match="an entry of GET /packs"):
        taking(url, here, meddle)
    assert here.files() == set()


def test_a_listing_that_lies_about_kernels_or_size(here: Machine, there: Machine, url: str) -> None:
    pack = there.publish(0, 1)

    def swapped(request: httpx.Request, content: bytes) -> bytes:
        if request.url.path != "/packs":
            return content
        page = json.loads(content)
        page["packs"][0]["kernels"].reverse()
        return json.dumps(page).encode()

    def larger(request: httpx.Request, content: bytes) -> bytes:
        return content.replace(b'"bytes":10000', b'"bytes":10001')

    assert taking(url, here, swapped) == [""] * 4
    assert taking(url, here, larger) == [""] * 4
    assert here.files() == set()
    assert taking(url, here, lambda _, content: content) == [pack.hash, pack.hash, "", ""]


def test_only_the_bytes_of_a_hash_are_adopted(here: Machine, there: Machine) -> None:
    pack = there.publish(0)
    ((_, manifest),) = there.packs.manifests()
    content = pack.path.read_bytes()
    for wrong in (content[:-1], content + b"\0", b""):
        with pytest.raises(PackCorrupt, match=pack.hash):
            here.packs.adopt(pack.hash, wrong, manifest)
    assert here.files() == set()
    assert here.packs.adopt(pack.hash, content, manifest).hash == pack.hash
    assert here.packs.find(MEMBERS[0], toolchain=there.toolchain.digest) is not None
    stored = (here.settings.packs / f"{pack.hash}.json").read_bytes()
    assert msgspec.json.decode(stored, type=Manifest) == manifest


def test_a_fetched_pack_is_kept_once(
    here: Machine, there: Machine, url: str, tmp_path: Path
) -> None:
    there.publish(0)
    compile_("--from", url)
    assert not (tmp_path / "cache").exists()
