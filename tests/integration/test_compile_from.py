"""`gemmsmith compile --from`: packs come from a real service; what it lacks is compiled here."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner, Result

from gemmsmith.candidate import Candidate
from gemmsmith.client import Client
from gemmsmith.errors import PackCorrupt, ServiceFault, ServiceUnavailable
from gemmsmith.launch import Launch
from gemmsmith.problem import Problem
from gemmsmith.signing import Signer, Trusted
from service import identity
from service.cli.main import app
from service.settings import Settings
from tests.support import fake_nvcc
from tests.support.replacing import replace
from tests.support.serving import new_settings, packs_of, promote, running, winner
from tuner.backends import kernels
from tuner.backends.unit import kernel_digest
from tuner.compile import ArtifactStore, Manifest, Pack, Toolchain
from tuner.compile.fetch import fetch
from tuner.errors import CompilerNotFound
from tuner.store import Store

MEMBERS = kernels(Problem(m=64, n=64, k=64))[:8]


@dataclass(kw_only=True)
class Machine:
    """One machine's settings, packs and compiler."""

    settings: Settings
    toolchain: Toolchain

    @property
    def packs(self) -> ArtifactStore:
        return packs_of(self.settings)

    @property
    def trusted(self) -> Trusted:
        return identity.trusted(self.settings)

    def publish(self, *members: int, toolchain: Toolchain | None = None) -> Pack:
        """As if these had been compiled here; the bytes are no real shared object."""
        compiled = self.settings.packs.parent / "unit.so"
        held = [MEMBERS[member] for member in members]
        names = b"".join(kernel.name.encode() + b"\0" for kernel in held)
        compiled.write_bytes(names + os.urandom(10_000 - len(names)))
        return self.packs.publish(compiled, held, toolchain or self.toolchain)

    def files(self) -> set[str]:
        return {path.name for path in self.settings.packs.iterdir()}


def machine(folder: Path) -> Machine:
    """One with a key of its own, which nobody else believes."""
    folder.mkdir()
    keys = {"signing_key": folder / "signing.key", "trusted": folder / "trusted"}
    return Machine(
        settings=new_settings(folder, **keys), toolchain=fake_nvcc.toolchain(folder / "toolchain")
    )


@pytest.fixture
def there(tmp_path: Path) -> Machine:
    """The machine that the service runs on."""
    return machine(tmp_path / "there")


@pytest.fixture
def here(tmp_path: Path, there: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine of the command; its winners are MEMBERS 0 … 3, and nothing is compiled.

    It believes the other one.
    """
    made = machine(tmp_path / "here")
    made.settings.trusted.mkdir()
    there_key = identity.signer(there.settings).public
    (made.settings.trusted / "there.pub").write_text(there_key.line)
    for name, value in made.settings.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("service.worker.builder.find_toolchain", lambda: made.toolchain)
    monkeypatch.setattr("gemmsmith.retry.RetryPolicy.delay", lambda *_: None)
    for i, member in enumerate(MEMBERS[:4]):
        problem = Problem(m=64 << i, n=64, k=64)
        candidate = Candidate(kernel=member, launch=Launch())
        promote(made.settings, replace(winner(problem), candidate=candidate))
    return made


@pytest.fixture
def url(there: Machine) -> Iterator[str]:
    with running(there.settings) as http:
        yield str(http.base_url)


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> Toolchain:
        raise CompilerNotFound("no nvcc ≥ 12.8. Install one.")

    monkeypatch.setattr("service.worker.builder.find_toolchain", nothing)


def compile_(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["compile", "--winners", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def document(result: Result) -> Any:
    """What `--json` printed; the service, which is in this process, logs to stdout too."""
    return json.loads(result.stdout[result.stdout.index("{\n") :])


class Meddling(httpx.BaseTransport):
    """The network, with somebody in between who may change or break what comes back."""

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
    assert result.stderr.splitlines()[-1].startswith("error: no answer from http://127.0.0.1:9")
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


def taking(url: str, here: Machine, meddle: Callable[[httpx.Request, bytes], bytes]) -> list[str]:
    """Fetch MEMBERS 0 … 3 through somebody who meddles; the hash of each that came, or ""."""
    with Client(url, cache_dir=None, retries=0, transport=Meddling(meddle)) as client:
        digest = here.toolchain.digest
        found = fetch(client, here.packs, MEMBERS[:4], toolchain=digest, trusted=here.trusted)
        return [item.pack.hash if item.pack else "" for item in found]


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


def offering(
    manifest: Manifest, pack_hash: str, content: bytes
) -> Callable[[httpx.Request, bytes], bytes]:
    """A service that offers one pack, whatever it really has."""

    def meddle(request: httpx.Request, _content: bytes) -> bytes:
        if request.url.path != "/packs":
            return content
        entry = msgspec.to_builtins(manifest) | {"hash": pack_hash}
        return msgspec.json.encode({"schema": 1, "packs": [entry], "links": {}})

    return meddle


def forged(there: Machine, *, wanted: bool = True) -> tuple[Manifest, str, bytes]:
    """A program of the attacker's own, under the manifest of an honest pack of MEMBERS 0 and 1."""
    honest = there.publish(*((0, 1) if wanted else (5, 6)))
    manifest = dict(there.packs.manifests())[honest.hash]
    content = honest.path.read_bytes()[:-4] + b"evil"
    return manifest, hashlib.sha256(content).hexdigest(), content


def test_a_forged_program_is_not_taken_under_an_honest_signature(
    here: Machine, there: Machine, url: str
) -> None:
    assert taking(url, here, offering(*forged(there))) == [""] * 4
    assert here.files() == set()


@pytest.mark.parametrize("signed", [True, False], ids=["a stranger's", "nobody's"])
def test_a_stranger_s_pack_is_refused_with_what_to_do(
    here: Machine, there: Machine, url: str, signed: bool
) -> None:
    """Nobody signed those that services of older releases offer."""
    (here.settings.trusted / "there.pub").unlink()
    pack = there.publish(0, 1, 2, 3)
    if not signed:
        unsign(there, pack)
    (refused,) = document(compile_("--from", url, "--json"))["refused"]
    assert ("is not among the 1 that are believed" if signed else "not signed") in refused
    assert pack.hash in refused
    assert f"gemmsmith signing trust {url}" in refused
    assert here.packs.get(pack.hash) is None


def unsign(there: Machine, pack: Pack) -> None:
    """As a manifest of an older release has it."""
    path = pack.path.with_suffix(".json")
    fields = json.loads(path.read_text())
    del fields["signature"], fields["taken"]
    path.with_suffix(".part").write_text(json.dumps(fields))
    path.with_suffix(".part").replace(path)


def test_unsigned_packs_are_taken_where_somebody_says_so_but_not_damaged_ones(
    here: Machine, there: Machine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.settings.trusted / "there.pub").unlink()
    monkeypatch.setenv("GEMMSMITH_UNSIGNED", "1")
    pack = there.publish(0, 1, 2, 3)
    unsign(there, pack)
    nameless = there.settings.packs.parent / "nameless"
    nameless.write_bytes(b"\x7fELF nothing that has a name")
    there.packs.publish(nameless, MEMBERS[:4], there.toolchain)  # the newest: offered first
    found = document(compile_("--from", url, "--json"))
    assert (found["counts"]["fetched"], found["counts"]["compiled"]) == (4, 0)
    (refused,) = found["refused"]
    assert f"nothing in it is named {MEMBERS[0].name}" in refused
    # Nor is it handed on as this installation's own, once that is no longer said.
    monkeypatch.delenv("GEMMSMITH_UNSIGNED")
    ours = dict(here.packs.manifests())[pack.hash]
    assert (ours.signature, len(ours.taken or [])) == (None, 4)
    assert here.packs.sign(identity.signer(here.settings)) == 0
    counts = document(compile_("--json"))["counts"]
    assert (counts["compiled"], counts["cached"]) == (4, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"toolchain": "0" * 64},
        {"nvcc": "13.1.1"},
        {"created_at": "2099-01-01T00:00:00+00:00"},
        {"kernels": [MEMBERS[0].name, MEMBERS[3].name]},
        {"digests": [kernel_digest(MEMBERS[1]), kernel_digest(MEMBERS[0])]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_manifest_altered_after_signing_is_refused(
    here: Machine, there: Machine, url: str, change: dict[str, object]
) -> None:
    pack = there.publish(0, 1)
    manifest = msgspec.structs.replace(dict(there.packs.manifests())[pack.hash], **change)
    with Client(
        url, cache_dir=None, transport=Meddling(offering(manifest, pack.hash, b""))
    ) as client:
        kernel = (
            MEMBERS[0] if "digests" not in change else replace(MEMBERS[0], name=MEMBERS[1].name)
        )
        found = list(fetch(client, here.packs, [kernel], toolchain=None, trusted=here.trusted))
    assert [item.pack for item in found] == [None]
    assert here.files() == set()


def test_a_pack_that_nobody_asked_for_is_left_there(
    here: Machine, there: Machine, url: str
) -> None:
    assert taking(url, here, offering(*forged(there, wanted=False))) == [""] * 4
    assert here.files() == set()


def test_a_pack_is_taken_for_more_when_more_is_asked_for(
    here: Machine, there: Machine, url: str
) -> None:
    pack = there.publish(0, 1, 5)
    watching = here.packs

    def take(number: int) -> list[bool]:
        with Client(url, cache_dir=None) as client:
            list(fetch(client, here.packs, [MEMBERS[number]], toolchain=None, trusted=here.trusted))
        found = here.packs.get(pack.hash)
        assert found is not None
        return [name is not None for name in found.kernels]

    # An index into the pack is what it was where it was compiled.
    assert take(1) == [False, True, False]
    assert watching.find(MEMBERS[0]) is None
    assert take(0) == [True, True, False]
    assert watching.find(MEMBERS[0]) is not None


def test_what_was_compiled_here_keeps_its_manifest(
    here: Machine, there: Machine, url: str, tmp_path: Path
) -> None:
    """Offered the same bytes as something else, even by somebody who is believed."""
    ours = here.publish(0)
    other = msgspec.structs.replace(
        dict(here.packs.manifests())[ours.hash], digests=[kernel_digest(MEMBERS[1])]
    )
    signed = other.signed(ours.hash, Signer.load(there.settings.signing_key))
    content = ours.path.read_bytes()
    assert taking(url, here, offering(signed, ours.hash, content))[1] == ""
    assert here.packs.find(MEMBERS[0]) == ours
    assert here.packs.find(MEMBERS[1]) is None


def test_a_revoked_signer_s_packs_are_left_alone(here: Machine, there: Machine, url: str) -> None:
    there.publish(0, 1, 2, 3)
    assert document(compile_("--from", url, "--json"))["counts"]["fetched"] == 4
    (here.settings.trusted / "there.pub").unlink()
    counts = document(compile_("--json"))["counts"]
    assert (counts["compiled"], counts["cached"]) == (4, 0)
