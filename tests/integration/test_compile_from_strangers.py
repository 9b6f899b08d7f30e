"""`gemmsmith compile --from` where the service, or somebody on the way, means harm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from gemmsmith.client import Client
from gemmsmith.signing import Signer
from service import identity
from tests.support.machines import MEMBERS, Machine, Meddling, compile_, document, taking
from tests.support.replacing import replace
from tuner.backends.unit import kernel_digest
from tuner.compile import Manifest, Pack
from tuner.compile.fetch import fetch


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
