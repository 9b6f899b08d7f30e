"""`gemmsmith profile`: recorded profiles without a GPU, and a played ncu with one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from service import contestants
from tests.support import played_ncu
from tests.support.commands import new_database, run
from tests.support.serving import new_settings, running
from tests.support.shipped import SLUG
from tuner.compile import Pack
from tuner.profiling import files, recorder
from tuner.profiling.files import file_in, read_profiles
from tuner.profiling.records import ProblemProfile

FILES = (f"{SLUG}.bf16.jsonl", f"{SLUG}.bf16.group_depth.jsonl")
RECORDED = (128, 1536, 2048, 32768)
DEEP = ("128x1536x2048x32768", "bf16.group_depth", "nt")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(files, "own_folder", lambda: tmp_path / "profiles")
    monkeypatch.setattr("tuner.devices.local_gpu", lambda *_: None)
    return new_database(tmp_path, monkeypatch, FILES)


def test_a_recorded_profile_is_shown_without_a_gpu(url: str) -> None:
    done = run("profile", *DEEP)
    assert "there is no NVIDIA H200 here: this profile is a recorded one" in done.stderr
    printed = " ".join(done.stdout.split())
    assert "128×1536×2048×32768 bf16.group_depth nt on NVIDIA H200" in printed
    assert "By Nsight Compute on 2026-11-25" in printed
    assert "duration when profiled 498.72 µs 531.20 µs" in printed
    assert "registers 168 168" in printed


def test_json_is_the_profile(url: str) -> None:
    document = json.loads(run("profile", *DEEP, "--json").stdout)
    known = msgspec.convert(document["profile"], ProblemProfile)
    assert (known.problem.batch, known.problem.m, known.problem.n, known.problem.k) == RECORDED
    assert document["trace"] is None
    assert document["waits"].startswith("By Nsight Compute")


def test_explain_has_the_profile_too(url: str) -> None:
    printed = run("explain", *DEEP).stdout
    assert "Nsight Compute, 2026-11-25" in printed
    assert "What the warps wait for was not counted." in " ".join(printed.split())
    without = json.loads(run("explain", 4096, 4096, 4096, "--json").stdout)
    assert (without["profile"], without["waits"]) == (None, "")


def test_a_service_shows_its_profile(url: str, tmp_path: Path) -> None:
    here = run("profile", *DEEP).stdout
    with running(new_settings(tmp_path, database=url)) as http:
        address = ("--url", http.base_url)
        shown = run("profile", *DEEP, *address).stdout
        failed = run("profile", 4096, 4096, 4096, *address, code=1)
    assert [line for line in here.splitlines() if line not in shown.splitlines()] == []
    assert "the service has no profile of 4096×4096×4096" in failed.stderr


def test_without_a_gpu_and_without_a_record_it_says_what_to_do(url: str) -> None:
    failed = run("profile", 4096, 4096, 4096, code=1).stderr
    assert "no NVIDIA H200 here, and no recorded profile of 4096×4096×4096" in failed
    assert "Run the command on such a GPU. Recorded are, for example: " in failed


@pytest.fixture
def gpu(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A played H200 with ncu: the folder of its files."""
    model = read_profiles(file_in(files.shipped_folder(), SLUG))[0].device
    monkeypatch.setattr("tuner.devices.local_gpu", lambda *_: model)
    pack = tmp_path / "pack.so"

    class Artifacts:
        def find(self, _kernel: object) -> Pack:
            return Pack(hash="0", path=pack, kernels=(), toolchain="")

    monkeypatch.setattr(contestants, "open_artifacts", lambda *_: Artifacts())
    monkeypatch.setattr(recorder, "trace", lambda *arguments: arguments[2].write_text("{}"))
    played_ncu.install(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_on_a_gpu_it_traces_counts_and_keeps_the_profile(gpu: Path) -> None:
    done = run("profile", 4096, 6144, 1024)
    [kept] = read_profiles(gpu / "profiles" / f"{SLUG}.jsonl")
    assert kept.candidate.candidate is not None
    assert kept.tool == "ncu 2025.3.1.0"
    trace = gpu / "profiles" / f"{SLUG} 4096×6144×1024 bf16 tn.trace.json"
    assert trace.read_text() == "{}"
    assert f"trace: {trace}" in done.stderr
    assert "50% for the tensor cores" in " ".join(done.stdout.split())
    assert "What a warp waits for" in done.stdout
    again = json.loads(run("explain", 4096, 6144, 1024, "--json").stdout)
    assert msgspec.convert(again["profile"], ProblemProfile) == kept
    assert again["profile_is_earlier"] is False


def test_files_may_be_named(gpu: Path, tmp_path: Path) -> None:
    output, trace = tmp_path / "mine.jsonl", tmp_path / "mine.json"
    options = ("--output", output, "--trace", trace, "--runners-up", 0, "--json")
    document = json.loads(run("profile", 4096, 6144, 1024, *options).stdout)
    assert document["trace"] == str(trace)
    assert len(read_profiles(output)) == 1
    assert not (gpu / "profiles" / f"{SLUG}.jsonl").exists()


def test_without_ncu_there_is_the_trace(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.profiling.ncu.find_ncu", lambda: None)
    done = run("profile", 4096, 6144, 1024)
    assert "no counters: ncu is not on the path" in done.stderr
    assert "trace: " in done.stderr


def test_runners_up_are_listed(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_in(gpu / "profiles", SLUG)
    run("profile", 4096, 6144, 1024)
    [kept] = read_profiles(path)
    files.add_profiles(path, [replace(kept, runners_up=(kept.candidate,))])
    monkeypatch.setattr("tuner.devices.local_gpu", lambda *_: None)
    listed = " ".join(run("profile", 4096, 6144, 1024).stdout.split())
    assert "runners-up µs tensor pipe waits most for" in listed
    assert "10.91 61% the tensor cores" in listed
