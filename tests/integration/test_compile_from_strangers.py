"""`gemmsmith compile --from` where the service, or somebody on the way, means harm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from gemmsmith.http.client import Client
from gemmsmith.signing import Signer
from service import identity
from tests.support.machines import MEMBERS, Machine, compile_, document
from tests.support.serving import running
from tuner.backends.unit import kernel_digest
from tuner.compile import Manifest, Pack
from tuner.compile.fetch import Fetched, fetch


def offered(here: Machine, manifest: Manifest, pack_hash: str, content: bytes) -> list[Fetched]:
    """What becomes of MEMBERS 0 … 3 at a service that offers this, whatever it is."""
    entry = msgspec.to_builtins(manifest) | {"hash": pack_hash}
    page = msgspec.json.encode({"schema": 1, "packs": [entry], "links": {}})

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=page if request.url.path == "/packs" else content)

    with Client("http://evil:1", cache_dir=None, transport=httpx.MockTransport(answer)) as client:
        return list(fetch(client, here.packs, MEMBERS[:4], toolchain=None, trusted=here.trusted))


def honest(there: Machine, *members: int) -> tuple[Manifest, str, bytes]:
    """A pack as it was published: manifest, hash and bytes."""
    pack = there.publish(*members)
    return dict(there.packs.manifests())[pack.hash], pack.hash, pack.path.read_bytes()


def forged(there: Machine, *members: int) -> tuple[Manifest, str, bytes]:
    """A program of the attacker's own, under the manifest of an honest pack."""
    manifest, _, content = honest(there, *members)
    content = content[:-4] + b"evil"
    return manifest, hashlib.sha256(content).hexdigest(), content


def test_a_forged_program_is_not_taken_under_an_honest_signature(
    here: Machine, there: Machine
) -> None:
    found = offered(here, *forged(there, 0, 1))
    assert [item.pack for item in found] == [None] * 4
    assert "it was altered" in found[0].refused[0]
    assert here.files() == set()


def test_what_is_offered_honestly_is_taken(here: Machine, there: Machine) -> None:
    """What the refusals here are held against."""
    found = offered(here, *honest(there, 0, 1))
    assert [item.pack is not None for item in found] == [True, True, False, False]


@pytest.fixture
def unsigning_url(there: Machine) -> Iterator[str]:
    """A service that offers packs without a trusted signature, as those of older releases do."""
    with running(there.settings.model_copy(update={"unsigned": True})) as http:
        yield str(http.base_url)


@pytest.mark.parametrize("signed", [True, False], ids=["a stranger's", "nobody's"])
def test_a_stranger_s_pack_is_refused_with_what_to_do(
    here: Machine, there: Machine, unsigning_url: str, signed: bool
) -> None:
    (here.settings.trusted / "there.pub").unlink()
    pack = there.publish(0, 1, 2, 3)
    if not signed:
        unsign(there, pack)
    (refused,) = document(compile_("--from", unsigning_url, "--json"))["refused"]
    assert ("is not among the" if signed else "not signed") in refused
    assert pack.hash in refused
    assert f"gemmsmith signing trust {unsigning_url}" in refused
    assert here.packs.get(pack.hash) is None


def unsign(there: Machine, pack: Pack) -> None:
    """As a manifest of an older release has it."""
    path = pack.path.with_suffix(".json")
    fields = json.loads(path.read_text())
    del fields["signature"], fields["taken"]
    path.with_suffix(".part").write_text(json.dumps(fields))
    path.with_suffix(".part").replace(path)


def test_unsigned_packs_are_taken_where_somebody_says_so_but_not_damaged_ones(
    here: Machine, there: Machine, unsigning_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.settings.trusted / "there.pub").unlink()
    monkeypatch.setenv("GEMMSMITH_UNSIGNED", "1")
    pack = there.publish(0, 1, 2, 3)
    unsign(there, pack)
    nameless = there.settings.packs.parent / "nameless"
    nameless.write_bytes(b"\x7fELF nothing that has a name")
    there.packs.publish(nameless, MEMBERS[:4], there.toolchain)  # the newest: offered first
    found = document(compile_("--from", unsigning_url, "--json"))
    assert (found["counts"]["fetched"], found["counts"]["compiled"]) == (4, 0)
    (refused,) = found["refused"]
    assert f"it does not contain {MEMBERS[0].name}" in refused
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
        {
            "kernels": [MEMBERS[0].name, MEMBERS[3].name],
            "digests": [kernel_digest(MEMBERS[0]), kernel_digest(MEMBERS[3])],
        },
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_manifest_altered_after_signing_is_refused(
    here: Machine, there: Machine, change: dict[str, object]
) -> None:
    manifest, pack_hash, content = honest(there, 0, 1)
    found = offered(here, msgspec.structs.replace(manifest, **change), pack_hash, content)
    assert [item.pack for item in found] == [None] * 4
    assert "it was altered" in found[0].refused[0]
    assert here.files() == set()


@pytest.mark.parametrize("make", [honest, forged])
def test_a_pack_that_nobody_asked_for_is_left_there(
    here: Machine, there: Machine, make: Callable[..., tuple[Manifest, str, bytes]]
) -> None:
    found = offered(here, *make(there, 5, 6))
    assert [(item.pack, item.refused) for item in found] == [(None, ())] * 4
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
    here: Machine, there: Machine, tmp_path: Path
) -> None:
    """Offered the same bytes as something else, even by somebody who is believed."""
    compiled = tmp_path / "unit.so"
    compiled.write_bytes(b"".join(kernel.name.encode() + b"\0" for kernel in MEMBERS))
    ours = here.packs.publish(compiled, MEMBERS[:1], here.toolchain)
    other = msgspec.structs.replace(
        dict(here.packs.manifests())[ours.hash],
        kernels=[MEMBERS[1].name],
        digests=[kernel_digest(MEMBERS[1])],
    ).signed(ours.hash, Signer.load(there.settings.signing_key))
    found = offered(here, other, ours.hash, compiled.read_bytes())
    assert [(item.pack, item.refused) for item in found] == [(None, ())] * 3
    assert here.packs.find(MEMBERS[0]) == ours
    assert here.packs.find(MEMBERS[1]) is None


def test_a_revoked_signer_s_packs_are_left_alone(here: Machine, there: Machine, url: str) -> None:
    there.publish(0, 1, 2, 3)
    assert document(compile_("--from", url, "--json"))["counts"]["fetched"] == 4
    (here.settings.trusted / "there.pub").unlink()
    counts = document(compile_("--json"))["counts"]
    assert (counts["compiled"], counts["cached"]) == (4, 0)
