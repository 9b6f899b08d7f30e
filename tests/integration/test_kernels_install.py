"""Files of kernels: who installs one waits for no compiler; what is not trusted stays out."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random

import msgspec
import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.errors import GemmsmithError, PackCorrupt, Untrusted
from gemmsmith.signing import Purpose, Trusted
from gemmsmith.version import VERSION
from service import identity
from service import kernels as service_kernels
from service.cli import kernels as command
from service.cli import serve
from service.settings import Settings
from service.worker.process import run as work
from tests.support import fake_nvcc
from tests.support.commands import run
from tests.support.disk import small_disk
from tests.support.kernels_files import build, files, install, names
from tests.support.machines import MEMBERS, Machine, compile_, document
from tests.support.serving import running
from tests.support.shipped import DEVICE
from tuner.compile import ArtifactStore, Pack, kernels_file
from tuner.errors import DiskFull, NotRecorded
from tuner.exchange import write_winners
from tuner.store import Store
from tuner.trial import Winner


def doubt(here: Machine) -> None:
    """Believe the other machine no longer."""
    (here.settings.trusted / "there.pub").unlink()


def test_installed_kernels_wait_for_no_compiler(here: Machine, there: Machine, file: Path) -> None:
    said = run("kernels", "install", file)
    assert "4 kernels in 2 packs of 0.0 MB, 2 of them new" in said.stdout
    assert "it has 4 of the 4 kernels that winners run here" in said.stderr
    assert "0 of them new" in run("kernels", "install", file).stdout
    counts = document(compile_("--json"))["counts"]
    assert (counts["compiled"], counts["cached"]) == (0, 4)
    assert fake_nvcc.calls(here.settings.packs.parent / "toolchain") == 0
    assert names(here) == {kernel.name for kernel in MEMBERS[:4]}
    theirs = dict(there.packs.manifests())
    for pack_hash, manifest in here.packs.manifests():
        # The signature stays that of its builder, whose key may be revoked.
        assert manifest.signature == theirs[pack_hash].signature
        assert manifest.taken == sorted(theirs[pack_hash].digests)
    assert here.files() == there.files()
    with running(here.settings) as http:
        listed = {row["hash"] for row in http.get("/packs").json()["packs"]}
        assert listed == theirs.keys()


def test_a_pack_is_taken_only_for_what_it_was_taken_for_before(
    here: Machine, there: Machine
) -> None:
    """A builder that has a pack from elsewhere vouches for no further kernels of it."""
    pack = there.publish(0, 1)
    manifest = dict(there.packs.manifests())[pack.hash]
    taken = msgspec.structs.replace(manifest, taken=manifest.digests[:1])
    target = there.settings.packs.parent / "made.gskernels"
    signer = identity.signer(there.settings)
    kernels_file.write(target, {pack.hash: (pack.path, taken)}, arch="sm90", signer=signer)
    assert install(here, target).contents.kernels == 1
    assert here.packs.find(MEMBERS[0]) is not None
    assert here.packs.find(MEMBERS[1]) is None
    assert install(here, build(there, pack)).added == 1  # now for both
    assert here.packs.find(MEMBERS[1]) is not None


def test_a_file_of_other_sources_says_so(here: Machine, file: Path) -> None:
    """As that of another release: its packs are there, and no problem asks for them."""

    def change(contents: kernels_file.Contents) -> kernels_file.Contents:
        packs = {
            pack_hash: msgspec.structs.replace(held, digests=[d[::-1] for d in held.digests])
            for pack_hash, held in contents.packs.items()
        }
        return msgspec.structs.replace(contents, packs=packs)

    here.settings = here.settings.model_copy(update={"unsigned": True})
    _relist(file, change)
    installed = install(here, file)
    with Store.open(here.settings.database) as store:
        assert service_kernels.of_winners(store, installed.contents) == (0, 4)


def test_kernels_that_nothing_here_describes_are_installed(here: Machine, there: Machine) -> None:
    """They are of the base: found by what they are compiled from, when a problem needs them."""
    assert install(here, build(there, there.publish(7))).added == 1
    assert names(here) == set()
    assert here.packs.find(MEMBERS[7]) is not None


def unsigned(file: Path, _: Machine) -> None:
    _relist(file, lambda contents: msgspec.structs.replace(contents, signature=None))


def altered(file: Path, _: Machine) -> None:
    _relist(file, lambda contents: msgspec.structs.replace(contents, gemmsmith="9"))


def pack_of_a_stranger(file: Path, there: Machine) -> None:
    """A list that is signed by a trusted key, with a pack that is not."""
    stranger = identity.signer(there.settings.model_copy(
        update={"signing_key": file.parent / "other.key", "trusted": file.parent / "none"}
    ))  # fmt: skip

    def change(contents: kernels_file.Contents) -> kernels_file.Contents:
        packs = {h: manifest.signed(h, stranger) for h, manifest in contents.packs.items()}
        changed = msgspec.structs.replace(contents, packs=packs, signature=None)
        signature = identity.signer(there.settings).sign(Purpose.PACK, changed.statement)
        return msgspec.structs.replace(changed, signature=signature)

    _relist(file, change)


def _relist(file: Path, change: Callable[[kernels_file.Contents], kernels_file.Contents]) -> None:
    with file.open("rb") as whole:
        contents, stream = kernels_file.read(whole, ""), whole.read()
    head = kernels_file.zstandard.ZstdCompressor().compress(msgspec.json.encode(change(contents)))
    file.write_bytes(kernels_file.MAGIC + len(head).to_bytes(8, "little") + head + stream)


def cut(file: Path, _: Machine) -> None:
    os.truncate(file, file.stat().st_size - 40)


def flipped(file: Path, _: Machine) -> None:
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


def lengthened(file: Path, _: Machine) -> None:
    with file.open("ab") as end:
        end.write(kernels_file.zstandard.ZstdCompressor().compress(bytes(100)))


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (unsigned, Untrusted),
        (altered, Untrusted),
        (pack_of_a_stranger, Untrusted),
        (cut, PackCorrupt),
        (flipped, PackCorrupt),
        (lengthened, PackCorrupt),
    ],
)
def test_of_a_file_that_is_refused_nothing_is_installed(
    here: Machine,
    there: Machine,
    file: Path,
    harm: Callable[[Path, Machine], None],
    error: type[GemmsmithError],
) -> None:
    harm(file, there)
    with pytest.raises(error):
        install(here, file)
    assert files(here) == set()
    assert names(here) == set()
    said = run("kernels", "install", file, code=1)
    assert said.stdout == ""
    assert said.stderr.count("\n") <= 3  # steps, and a line of error
    assert "error: " in said.stderr


def test_whose_key_is_not_trusted_is_named(here: Machine, there: Machine, file: Path) -> None:
    doubt(here)
    said = run("kernels", "install", file, code=1).stderr
    assert identity.signer(there.settings).public.id in said
    assert "gemmsmith signing trust KEY.pub" in said
    assert "not trusted here" in run("kernels", "list", file).stderr
    key = here.settings.packs.parent / "their.pub"
    key.write_text(identity.signer(there.settings).public.line)
    run("signing", "trust", key, "--yes")
    run("kernels", "install", file)
    assert len(list(here.settings.packs.glob("*.so"))) == 2


def test_unsigned_files_are_accepted_where_that_is_set(
    here: Machine, there: Machine, file: Path
) -> None:
    unsigned(file, there)
    doubt(here)
    here.settings = here.settings.model_copy(update={"unsigned": True})
    assert install(here, file).added == 2
    flipped(file, there)
    shutil.rmtree(here.settings.packs)
    with pytest.raises(PackCorrupt):
        install(here, file)


def test_a_releases_file_is_used_though_its_key_is_for_winners(
    here: Machine, there: Machine, file: Path
) -> None:
    """From elsewhere such packs are refused; this file was installed, as gemmsmith was."""
    doubt(here)
    keys = here.settings.packs.parent / "shipped"
    keys.mkdir()
    (keys / "release.pub").write_text(identity.signer(there.settings).public.line)
    here.settings = here.settings.model_copy(update={"shipped_keys": keys})
    trusted = identity.trusted_packs(here.settings)
    for pack_hash, manifest in there.packs.manifests():
        with pytest.raises(Untrusted, match="for winners only"):
            manifest.check(pack_hash, trusted or Trusted())
    assert install(here, file).added == 2
    assert install(here, file).added == 0
    mine = identity.trusted_packs(here.settings)
    assert ArtifactStore(here.settings.packs, trusted=mine).find(MEMBERS[0]) is not None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("arch", "sm100", "this GPU is sm90"),
        ("machine", "riscv64", "for riscv64 processors"),
        ("abi", (90, 91), "of the C ABI"),
    ],
)
def test_kernels_for_another_machine_are_refused(
    here: Machine,
    file: Path,
    field: str,
    value: object,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = DeviceModel(name="NVIDIA H100", arch="sm90", sm_count=132, memory_bytes=1, l2_bytes=1)
    monkeypatch.setattr(service_kernels, "local_gpu", lambda: model)
    _relist(file, lambda contents: msgspec.structs.replace(contents, **{field: value}))
    assert message in run("kernels", "install", file, code=1).stderr
    assert files(here) == set()


def test_a_full_disk_is_noticed_before_the_first_pack(
    here: Machine, file: Path, tmp_path: Path
) -> None:
    with small_disk(30) as disk:
        here.settings = here.settings.model_copy(update={"packs": disk.folder / "packs"})
        disk.fill()
        with pytest.raises(DiskFull, match="nothing was installed"):
            install(here, file)
        assert files(here) == set()
        disk.free()
        assert install(here, file).added == 2


def test_a_disk_that_fills_up_meanwhile_keeps_whole_packs(
    here: Machine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.compile.install._check_space", lambda *_: None)
    with small_disk(1) as disk:
        here.settings = here.settings.model_copy(update={"packs": disk.folder / "packs"})
        (disk.folder / "most").write_bytes(bytes(2**20 - 24 * 2**10))
        with pytest.raises(DiskFull, match="no space left"):
            install(here, file)
        (pack,) = here.packs.packs()
        assert here.files() == {pack.path.name, pack.path.with_suffix(".json").name}
        (disk.folder / "most").unlink()
        assert install(here, file).added == 1
    assert names(here) == {kernel.name for kernel in MEMBERS[:4]}


def _killed(settings: Settings, file: Path) -> None:
    """Install the file; the process ends before the second pack is in the folder."""
    adopt = ArtifactStore.adopt

    def once(self: ArtifactStore, *arguments: object) -> Pack:
        if len(self.manifests()) == 1:
            os._exit(9)
        return adopt(self, *arguments)  # type: ignore[arg-type]

    ArtifactStore.adopt = once  # type: ignore[method-assign]
    with Store.open(settings.database) as store:
        service_kernels.install(settings, store, str(file))


def _installed(settings: Settings, file: Path, ready: Event | None = None) -> None:
    if ready is not None:
        ready.set()
    with Store.open(settings.database) as store:
        service_kernels.install(settings, store, str(file))


def processes(target: Callable[[Settings, Path], None], count: int, *arguments: object) -> set[int]:
    """Exit statuses of processes that run this."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=target, args=arguments) for _ in range(count)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    return {process.exitcode or 0 for process in started}


def test_after_a_kill_the_same_command_goes_on(here: Machine, file: Path) -> None:
    assert processes(_killed, 1, here.settings, file) == {9}
    assert len(here.packs.packs()) == 1
    assert install(here, file).added == 1
    assert names(here) == {kernel.name for kernel in MEMBERS[:4]}
    assert not [name for name in here.files() if name.startswith(".")]


def test_killed_at_any_moment_all_packs_are_whole(here: Machine, there: Machine) -> None:
    file = build(there, *(there.publish(number % 8) for number in range(120)))
    wanted, random = {pack.hash for pack in there.packs.packs()}, Random(43)
    context = multiprocessing.get_context("spawn")
    before = -1
    for _ in range(5):
        ready = context.Event()
        process = context.Process(target=_installed, args=(here.settings, file, ready))
        process.start()
        assert ready.wait(60)
        time.sleep(random.uniform(0.02, 0.5))
        process.kill()
        process.join()
        here_now = {pack.hash for pack in here.packs.packs()}  # hashes all that are listed
        assert here_now == {pack_hash for pack_hash, _ in here.packs.manifests()}
        assert here_now <= wanted
        assert len(here_now) >= before
        before = len(here_now)
    install(here, file)
    assert {pack.hash for pack in here.packs.packs()} == wanted
    assert names(here) == {kernel.name for kernel in MEMBERS[:4]}


def test_installs_at_once_do_not_disturb_each_other(here: Machine, file: Path) -> None:
    assert processes(_installed, 3, here.settings, file) == {0}
    assert len(here.packs.packs()) == 2
    assert names(here) == {kernel.name for kernel in MEMBERS[:4]}
    assert not [name for name in here.files() if name.startswith(".")]


def test_a_pipe_is_a_file_too(here: Machine, file: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = threading.Thread(target=lambda: pipe.write_bytes(file.read_bytes()))
    thread.start()
    assert install(here, pipe).added == 2
    thread.join()


def test_services_and_workers_install_what_the_setting_names(
    here: Machine, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = here.settings.model_copy(update={"kernels": str(file), "device": DEVICE})
    serve.prepare(settings)
    assert names(here) == {kernel.name for kernel in MEMBERS[:4]}
    shutil.rmtree(settings.packs)
    with pytest.raises(NotRecorded):  # a worker without a device ends after that
        work(settings)
    assert len(here.packs.packs()) == 2
    assert "not installed" not in capsys.readouterr().out


@pytest.mark.parametrize("source", ["missing.gskernels", "http://127.0.0.1:9/x", "http://", "/"])
def test_a_service_starts_without_them(
    here: Machine, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    serve.prepare(here.settings.model_copy(update={"kernels": source}))
    said = capsys.readouterr()
    assert "kernels are not installed" in said.out + said.err
    assert files(here) == set()


def test_a_file_says_what_is_in_it(here: Machine, there: Machine, file: Path) -> None:
    said = run("kernels", "list", file)
    assert said.stdout.split() == sorted(kernel.name for kernel in MEMBERS[:4])
    assert not here.settings.signing_key.exists()  # to look changes nothing
    key = identity.signer(there.settings).public.id
    assert f"for sm90 and {os.uname().machine}, built by gemmsmith {VERSION}, nvcc" in said.stderr
    assert f"signed with the key {key}, which is trusted here" in said.stderr
    listed = json.loads(run("kernels", "list", file, "--json").stdout)
    assert (listed["kernels"], listed["packs"], listed["trusted"]) == (4, 2, True)


@pytest.fixture
def shipped(here: Machine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four shipped winners, and a base of a further kernel."""
    folder = here.settings.packs.parent / "winners"
    folder.mkdir()
    with Store.open(here.settings.database) as store:
        write_winners(folder / "some.jsonl", store.winners())
    monkeypatch.setenv("GEMMSMITH_WINNERS", str(folder))

    def base_kernels(model: DeviceModel, winners: Sequence[Winner]) -> list[AnyKernel]:
        assert model.slug == here.settings.default_model
        assert len(winners) == 4
        return [MEMBERS[5], MEMBERS[0]]

    monkeypatch.setattr("tuner.search.base.base_kernels", base_kernels)
    return folder


def test_it_is_built_of_the_winners_and_what_wins_often(here: Machine, shipped: Path) -> None:
    listed = command.needed(here.settings.model_copy(update={"winners": shipped}))
    assert {kernel.name for kernel in listed[:4]} == {kernel.name for kernel in MEMBERS[:4]}
    assert listed[4:] == [MEMBERS[5]]


def test_what_is_compiled_for_it_is_kept(
    here: Machine, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out" / "made.gskernels"
    toolchain = fake_nvcc.toolchain(tmp_path / "toolchain", bad=[MEMBERS[5].name])
    monkeypatch.setattr("service.worker.builder.find_toolchain", lambda: toolchain)
    said = run("kernels", "build", "-o", target, code=1).stderr
    assert MEMBERS[5].name in said
    assert not target.exists()
    before = fake_nvcc.calls(tmp_path / "toolchain")
    built = run("kernels", "build", "--limit", 4, "-o", target)
    assert f"{target}: 4 kernels in " in built.stdout
    assert fake_nvcc.calls(tmp_path / "toolchain") == before  # nothing is compiled twice
    whole = target.read_bytes()
    run("kernels", "build", "--limit", 4, "-o", target)
    assert target.read_bytes() == whole
    with target.open("rb") as file:
        contents = kernels_file.read(file, "made")
    trusted = Trusted([identity.signer(here.settings).public])
    contents.check(trusted)
    for pack_hash, manifest in contents.packs.items():
        manifest.check(pack_hash, trusted)
