"""The wheel of compiled kernels: who has it installed waits for no compiler, and asks nobody."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from configs.kernels import build
from gemmsmith import Packs
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.errors import PackUntrusted, Untrusted
from gemmsmith.signing import Trusted, key_in
from gemmsmith.version import VERSION
from gemmsmith.winners import installed
from service import database, identity
from tests.support import fake_nvcc
from tests.support.candidates import KERNEL
from tests.support.docs import ROOT
from tests.support.machines import MEMBERS, Machine, compile_, document
from tests.support.serving import running
from tuner.compile import ArtifactStore, Manifest, Pack
from tuner.compile.installed import take
from tuner.store import Store
from tuner.trial import Winner


@pytest.fixture
def folder(there: Machine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What another machine compiled, as if it were installed here."""
    monkeypatch.setattr(installed, "folders", lambda: (there.settings.packs,))
    return there.settings.packs


def doubt(here: Machine) -> None:
    """Believe the other machine no longer."""
    (here.settings.trusted / "there.pub").unlink()


def test_installed_packs_are_taken_in_once(here: Machine, there: Machine, folder: Path) -> None:
    both, single = there.publish(0, 1), there.publish(2)
    taken = {
        item.path.stem: item.pack
        for item in take(here.packs, installed.folders(), trusted=here.trusted)
    }
    assert taken.keys() == {both.hash, single.hash}
    manifests = dict(here.packs.manifests())
    theirs = dict(there.packs.manifests())
    for pack_hash, pack in taken.items():
        assert pack is not None
        assert pack.path.parent == here.settings.packs
        assert manifests[pack_hash].signature == theirs[pack_hash].signature
        assert manifests[pack_hash].taken == sorted(theirs[pack_hash].digests)
    assert here.packs.find(MEMBERS[1]) is not None
    assert list(take(here.packs, installed.folders(), trusted=here.trusted)) == []


def test_what_nobody_believed_has_signed_or_is_damaged_stays_out(
    here: Machine, there: Machine, folder: Path
) -> None:
    packs = [there.publish(member) for member in range(4)]
    stranger = list(take(here.packs, installed.folders(), trusted=Trusted()))
    assert len(stranger) == 4
    assert all("not among the" in item.refusal and item.pack is None for item in stranger)
    packs[0].path.write_bytes(b"other bytes")
    packs[1].path.unlink()
    packs[2].path.with_suffix(".json").write_bytes(b"{}")
    manifest = msgspec.json.decode(packs[3].path.with_suffix(".json").read_bytes(), type=Manifest)
    other = msgspec.structs.replace(manifest, kernels=[KERNEL.name])
    packs[3].path.with_suffix(".json").write_bytes(msgspec.json.encode(other))
    refused = list(take(here.packs, installed.folders(), trusted=here.trusted))
    assert [item.pack for item in refused] == [None] * 4
    assert all(item.refusal for item in refused)
    assert list(here.settings.packs.glob("*.so")) == []


def test_a_releases_wheel_is_used_though_its_key_is_for_winners(
    here: Machine, there: Machine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From elsewhere such packs are refused; this wheel was installed, as gemmsmith was."""
    pack = there.publish(0)
    doubt(here)
    keys = here.settings.packs.parent / "shipped"
    keys.mkdir()
    (keys / "release.pub").write_text(identity.signer(there.settings).public.line)
    settings = here.settings.model_copy(update={"shipped_keys": keys})
    trusted = identity.trusted_packs(settings)
    with pytest.raises(Untrusted, match="for winners only"):
        dict(there.packs.manifests())[pack.hash].check(pack.hash, trusted or Trusted())
    for _ in range(2):
        database.prepare(settings)
        with Store.open(settings.database) as store:
            assert store.pack_for(MEMBERS[0].name) == pack.hash
        mine = identity.trusted_packs(settings)
        assert ArtifactStore(settings.packs, trusted=mine).find(MEMBERS[0]) is not None
    assert "not used" not in capsys.readouterr().out


def test_winners_wait_for_no_compiler(here: Machine, there: Machine, folder: Path) -> None:
    both, rest = there.publish(0, 1), there.publish(2, 3)
    told = document(compile_("--json"))
    assert (told["counts"]["compiled"], told["counts"]["cached"]) == (0, 4)
    assert set(told["kernels"].values()) == {both.hash, rest.hash}
    assert fake_nvcc.calls(here.settings.packs.parent / "toolchain") == 0


def test_a_service_names_them_from_the_start(here: Machine, there: Machine, folder: Path) -> None:
    pack = there.publish(0, 1, 2, 3)
    there.publish(7)  # of a kernel that nothing here has described
    database.prepare(here.settings)
    with Store.open(here.settings.database) as store:
        assert store.pack_for(MEMBERS[0].name) == pack.hash
        assert store.pack_for(MEMBERS[7].name) is None
    with running(here.settings) as http:
        rows = http.get("/results", params={"limit": 1})
        assert rows.status_code == 200
        listed = {row["hash"] for row in http.get("/packs").json()["packs"]}
        assert pack.hash in listed
        assert http.get(f"/packs/{pack.hash}").content == pack.path.read_bytes()


def test_what_cannot_be_used_is_told_and_nothing_stops(
    here: Machine, there: Machine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there.publish(0)
    doubt(here)
    database.prepare(here.settings)
    told = capsys.readouterr()
    assert "installed packs are not used" in told.out + told.err
    with Store.open(here.settings.database) as store:
        assert store.pack_for(MEMBERS[0].name) is None


def test_training_finds_them_without_fetching(
    there: Machine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = there.publish(0)

    def read(pack_hash: str) -> bytes:
        raise AssertionError(f"{pack_hash} was fetched")

    packs = Packs(read, folder=tmp_path / "cache")
    with pytest.raises(PackUntrusted):  # installed or not
        packs.path(pack.hash)
    monkeypatch.setenv("GEMMSMITH_UNSIGNED", "1")
    assert packs.path(pack.hash) == pack.path
    pack.path.write_bytes(b"damaged")
    with pytest.raises(AssertionError, match="was fetched"):
        Packs(read, folder=tmp_path / "cache").path(pack.hash)


def test_nothing_is_installed_here() -> None:
    installed.folders.cache_clear()
    assert installed.folders() == ()
    assert installed.find("a" * 64) is None


def test_what_is_compiled_for_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toolchain = fake_nvcc.toolchain(tmp_path / "toolchain", bad=[MEMBERS[2].name])
    monkeypatch.setattr("service.worker.builder.find_toolchain", lambda: toolchain)
    monkeypatch.setattr(build, "kernels", lambda *_: list(MEMBERS[:3]))
    packed: list[list[Pack]] = []

    def wheel(packs: list[Pack], output: Path) -> Path:
        packed.append(packs)
        (output / "made.whl").write_bytes(b"PK")
        return output / "made.whl"

    monkeypatch.setattr(build, "wheel", wheel)
    for name in ("SIGNING_KEY", "TRUSTED"):
        monkeypatch.setenv(f"GEMMSMITH_{name}", str(tmp_path / name.lower()))
    where = ["--work", str(tmp_path / "work"), "-o", str(tmp_path / "dist")]
    for _ in range(2):
        assert build.main(["--limit", "2", *where]) == 0
    assert packed[0] == packed[1]
    assert fake_nvcc.calls(tmp_path / "toolchain") == len(packed[0])
    (key,) = (tmp_path / "dist").glob("*.pub")
    assert "2 kernels in" in capsys.readouterr().out
    for pack in packed[0]:
        manifest = msgspec.json.decode(pack.path.with_suffix(".json").read_bytes(), type=Manifest)
        manifest.check(pack.hash, Trusted([key_in(key)]))
    assert build.main(where) == 1  # one does not compile: nothing is packed
    assert len(packed) == 2
    assert MEMBERS[2].name in capsys.readouterr().err


def test_it_is_made_for_the_winners_and_what_wins_often(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def base_kernels(model: DeviceModel, winners: Sequence[Winner]) -> list[AnyKernel]:
        assert model.slug == here.settings.default_model
        assert len(winners) == 4
        return [MEMBERS[5], MEMBERS[0]]

    monkeypatch.setattr(build, "base_kernels", base_kernels)
    with Store.open(here.settings.database) as store:
        listed = build.kernels(here.settings, store)
    assert {kernel.name for kernel in listed[:4]} == {kernel.name for kernel in MEMBERS[:4]}
    assert listed[4:] == [MEMBERS[5]]


@pytest.mark.long
def test_it_is_installed_and_found(here: Machine, there: Machine, tmp_path: Path) -> None:
    packs = [there.publish(0, 1), there.publish(2, 3)]
    wheel = build.wheel(packs, tmp_path)
    tags = f"py3-none-linux_{platform.machine()}"  # these are no real shared objects
    assert wheel.name == f"gemmsmith_kernels_sm90-{VERSION}-{tags}.whl"
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True, with_pip=False)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index")
    subprocess.run([*pip, "--no-deps", wheel], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    library = Path(installed.__file__).parents[2]
    (packages / "dependencies.pth").write_text(
        f"{library}\n{ROOT}\n{sysconfig.get_path('purelib')}\n"
    )
    program = (
        "import json; from gemmsmith.winners import installed;"
        f"print(json.dumps([str(installed.find(name)) for name in {[p.hash for p in packs]}]))"
    )
    printed = json.loads(subprocess.check_output([python, "-c", program], text=True))
    folder = packages / "gemmsmith_kernels" / "sm90"
    assert printed == [str(folder / f"{pack.hash}.so") for pack in packs]
    # The whole way, by the command: no compiler, and a machine that has never seen the other.
    words = ["-m", "service.cli.main", "compile", "--winners", "--json"]
    told = subprocess.run(
        [python, *words], capture_output=True, text=True, check=False,
        env=os.environ | {"PATH": "/bin", "PYTHONPATH": ""},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    counts = json.loads(told.stdout)["counts"]
    assert (counts["compiled"], counts["cached"], counts["failed"]) == (0, 4, 0)
