"""Commands that read and write the database, with real stores and made-up winners."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemmsmith.answers.answer import Ratio
from gemmsmith.core.config import Use
from gemmsmith.core.problem import DType, Problem
from gemmsmith.signing import Signer
from tests.support.commands import run, use
from tests.support.replacing import replace
from tests.support.serving import H100, H200, new_settings, promote, trial, winner
from tuner.store import Store

KNOWN = Problem(m=4096, n=4096, k=4096)
STAYS = Problem(m=512, n=512, k=8192)
FP16 = Problem(m=256, n=4096, k=4096, dtype=DType.FP16)


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    settings = use(new_settings(tmp_path), monkeypatch)
    monkeypatch.setattr("tuner.devices.local_gpu", lambda *_: None)
    promote(
        settings,
        winner(KNOWN, us=190.0),
        winner(STAYS, use=Use.CUBLAS, us=14.0),
        winner(FP16),
        winner(KNOWN, device=H100, us=250.0),
    )
    with Store.open(settings.database) as store:
        for i in range(4):
            store.add_trial(trial(KNOWN, i))
    return settings.database


def test_best_from_the_database() -> None:
    answer = json.loads(run("best", 4096, 4096, 4096, "--device", H200.slug, "--json").stdout)
    assert answer["match"] == "exact"
    assert answer["statistics"]["median_us"] == 190.0
    text = run("best", 4096, 4096, 4096, "--device", H100.slug).stdout
    assert "250.00 µs" in text
    assert "H100" in text
    near = run("best", 4096, 4096, 5000, "--device", H200.slug).stdout
    assert "nearest: measured on 4096×4096×4096" in near
    assert "keep torch's own operator" in run("best", 512, 512, 8192, "--device", H200.slug).stdout


def test_best_says_where_power_decided(database: str) -> None:
    faster = run("best", 512, 512, 8192, "--device", H200.slug).stdout
    assert "our kernel gains less than its higher power draw costs" in faster
    lines = faster.splitlines()
    assert lines[2:4] == [
        "  use        cuBLAS: keep torch's own operator",
        "  time       15.40 µs  (15.25 … 15.55)  (cuBLAS)",  # what is served goes first
    ]
    assert "14.00 µs  (13.86 … 14.14)" in lines[6]
    with Store.open(database) as store:
        store.promote(replace(winner(STAYS, use=Use.CUBLAS), power_penalty=1.12))
        told = run("best", 512, 512, 8192, "--device", H200.slug).stdout
        assert "at the power limit: it must be 1.120 × as fast (docs/choosing.md)" in told
        behind = Ratio(median=0.95, ci_low=0.94, ci_high=0.96)
        store.promote(replace(winner(STAYS, use=Use.CUBLAS), speedup=behind))
    slower = run("best", 512, 512, 8192, "--device", H200.slug).stdout
    assert "keep torch's own operator" in slower
    assert "more power" not in slower


def test_best_of_something_unknown_is_predicted() -> None:
    asked = ("best", 7, 9, 11, "--dtype", "fp16", "--device", H200.slug)
    text = run(*asked).stdout
    assert "predicted: not tuned yet, nothing was measured" in text
    assert "use        cuBLAS" in text
    assert "gemmsmith tune 7 9 11 --dtype fp16 --layout tn" in text
    answer = json.loads(run(*asked, "--json").stdout)
    assert (answer["match"], answer["use"]) == ("predicted", "cublas")
    assert f"the cost model expects {answer['predicted_us']:.2f} µs" in text
    assert answer["config"]["kernel"]["name"] in text


def test_best_of_something_unknown_says_how_to_tune_it() -> None:
    result = run("best", 7, 9, 11, "--dtype", "fp16", "--device", H200.slug, "--exact", code=1)
    assert "gemmsmith tune 7 9 11 --dtype fp16 --layout tn" in result.stderr
    result = run("best", 7, 9, 11, "--device", "h900", code=1)
    assert H200.slug in result.stderr


def test_results() -> None:
    rows = [json.loads(line) for line in run("results", "--json").stdout.splitlines()]
    assert len(rows) == 4
    assert {row["statistics"]["median_us"] for row in rows} == {10.0, 11.0, 12.0, 13.0}
    assert len(run("results", "--json", "--limit", 3).stdout.splitlines()) == 3
    matching = run("results", "--json", "--problem", 4096, 4096, 4096, "--phase", "screen")
    assert len(matching.stdout.splitlines()) == 4
    assert run("results", "--json", "--problem", 1, 2, 3).stdout == ""
    assert run("results", "--json", "--dtype", "fp16").stdout == ""
    table = run("results").stdout
    assert "4096×4096×4096 bf16 tn" in table
    assert rows[0]["candidate"]["kernel"]["name"] in table.replace("\n", "")


def test_winners() -> None:
    found = [json.loads(x) for x in run("results", "--winners", "--json").stdout.splitlines()]
    assert len(found) == 4
    only = run("results", "--winners", "--json", "--device", H100.slug).stdout.splitlines()
    assert len(only) == 1
    assert "cublas" in run("results", "--winners").stdout


def test_winners_travel_as_files(tmp_path: Path) -> None:
    path = tmp_path / "out" / "winners.jsonl"
    assert json.loads(run("export", path, "--json").stdout)["winners"] == 4
    other = f"sqlite:///{tmp_path}/other.db"
    first = json.loads(run("import", path, "--database", other, "--json").stdout)
    stored = {"file": str(path), "added": 0, "kept": 0, "unbelieved": 4, "keys": []}
    assert first["files"] == [stored]
    told = run("import", path, "--database", other)
    assert "0 winners added, 0 known already" in told.stdout
    assert "4 winners are stored and not served" in told.stderr
    assert "they are not signed. To trust a key, put its public half" in told.stderr
    assert run("results", "--winners", "--json", "--database", other).stdout == ""
    waiting = run("results", "--unanswered", "--json", "--database", other).stdout.splitlines()
    assert [json.loads(line)["origin"] for line in waiting] == ["unsigned"] * 4
    assert run("import", path, "--unsigned", "--database", other).stderr == ""
    again = run("import", path, "--database", other).stdout
    assert "0 winners added, 4 known already" in again
    narrow = tmp_path / "narrow.jsonl"
    assert "1 winners" in run("export", narrow, "--dtype", "fp16").stdout
    result = run("export", narrow, "--device", "h900", code=1)
    assert H200.slug in result.stderr
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(path.read_bytes()[:-40])
    third = f"sqlite:///{tmp_path}/third.db"
    result = run("import", damaged, "--database", third, code=2)
    assert result.stderr.startswith("error: ")
    assert result.stderr.endswith("nothing of this file was taken\n")
    assert run("results", "--winners", "--json", "--database", third).stdout == ""
    result = run("import", path, damaged, "--database", third, code=2)
    assert f"{path}: 0 winners added, 0 known already" in result.stderr, "its winners are kept"
    result = run("winners", "sign", path, damaged, code=2)
    assert f"{path}: 4 winners signed with" in result.stderr


def test_enumerate_counts_and_orders() -> None:
    document = json.loads(run("enumerate", 4096, 4096, 4096, "--json", "--limit", 5).stdout)
    assert document["counts"]["candidates"] >= document["counts"]["kernels"] > 50
    times = [candidate["predicted_us"] for candidate in document["candidates"]]
    assert len(times) == 5
    assert times == sorted(times)
    odd = json.loads(run("enumerate", 7, 13, 127, "--json").stdout)
    assert odd["counts"]["kernels"] >= 1
    assert "candidates" in run("enumerate", 64, 64, 64, "--limit", 1).stdout


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        ("sm80", "can be compiled here, not measured"),
        ("sm100", "can be compiled here, not measured"),
        ("sm90", "sm90 (H100, H200, H20), measured"),
    ],
)
def test_enumerate_lists_other_architectures(arch: str, said: str) -> None:
    document = json.loads(run("enumerate", 4096, 4096, 4096, "--arch", arch, "--json").stdout)
    assert document["measured"] is (arch == "sm90")
    assert document["counts"]["kernels"] >= len(document["kernels"]) == 20
    assert {kernel["arch"] for kernel in document["kernels"]} == {arch}
    text = run("enumerate", 4096, 4096, 4096, "--arch", arch, "--limit", 1).stdout
    assert said in text
    assert document["kernels"][0]["name"] in text


def test_doctor_finds_what_is_there(tmp_path: Path) -> None:
    result = run("doctor", "--json", "--url", "http://127.0.0.1:9")
    document = json.loads(result.stdout)
    checks = {check["name"]: check for check in document["checks"]}
    assert document["can"]["serve"] is True
    assert checks["database"]["status"] == "ok"
    assert "4 winners" in checks["database"]["detail"]
    assert checks["cutlass"]["status"] == "ok"
    assert checks["service"]["status"] == "warning"
    assert all(check["fix"] for check in checks.values() if check["status"] == "missing")
    text = run("doctor", "--url", "http://127.0.0.1:9").stdout
    assert "serve answers" in text


def test_doctor_says_when_serving_is_impossible(tmp_path: Path) -> None:
    (tmp_path / "bad.db").write_bytes(b"this is no database, it is a letter to whom it may concern")
    result = run("doctor", "--json", "--database", f"sqlite:///{tmp_path}/bad.db", code=1)
    document = json.loads(result.stdout)
    assert document["can"]["serve"] is False
    (check,) = [check for check in document["checks"] if check["name"] == "database"]
    assert check["status"] == "missing"
    assert check["fix"]


def test_doctor_does_not_create_a_database(tmp_path: Path) -> None:
    run("doctor", "--database", f"sqlite:///{tmp_path}/never.db", "--url", "http://127.0.0.1:9")
    assert not (tmp_path / "never.db").exists()


def test_signed_winners_are_believed_where_their_key_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "winners.jsonl"
    run("export", path)
    signer = Signer.create(tmp_path / "release.key", "a release")
    said = run("winners", "sign", path, "--key", tmp_path / "release.key").stdout
    assert f"4 winners signed with {signer.public.id}" in said
    other = f"sqlite:///{tmp_path}/other.db"
    told = run("import", path, "--database", other).stderr
    assert f"keys that are not trusted here ({signer.public.id})" in told
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    (trusted / "release.pub").write_text(signer.public.line)
    monkeypatch.setenv("GEMMSMITH_TRUSTED", str(trusted))
    assert "4 winners added" in run("import", path, "--database", other).stdout
    (trusted / "release.pub").write_text("not a key")
    refused = run("import", path, "--database", other, code=2).stderr
    assert "release.pub: not a public key" in refused
    (tmp_path / "release.key").chmod(0o644)
    assert (
        "chmod 600"
        in run("winners", "sign", path, "--key", tmp_path / "release.key", code=2).stderr
    )
