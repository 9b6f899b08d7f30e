"""Snapshots: what they choose, and that a revision means its winners."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gemmsmith import Config, Launch, Layout, Problem, Use
from gemmsmith.answers.snapshot import Row, Snapshot
from gemmsmith.errors import SnapshotCorrupt, Untrusted
from gemmsmith.kernel import TileScheduler
from gemmsmith.launch import Decomposition
from gemmsmith.signing import Signer, Trusted
from tests.support.candidates import KERNEL
from tests.support.replacing import replace
from tests.support.snapshots import BIG, CONFIG, H200, PACK, document, row, snapshot


def changed(fields: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The fields with those of the change, nested ones too."""
    inner = {
        name: changed(fields.get(name, {}), value) if isinstance(value, dict) else value
        for name, value in change.items()
    }
    return fields | inner


def test_the_exact_winner_comes_first_then_the_nearest_legal_one() -> None:
    near = Problem(m=2048, n=4096, k=4096)
    found = snapshot(row(BIG, saving_us=7.5), row(near, deterministic=False, saving_us=3.0))
    exact = found.find(BIG)
    assert exact is not None
    assert (exact.config, exact.measured, exact.distance, exact.deterministic) == (
        CONFIG, BIG, 0.0, True,
    )  # fmt: skip
    other = found.find(replace(BIG, m=1500))
    assert other is not None
    assert exact.saving_us == 7.5
    # A neighbour's kernel was not measured here, so nobody knows what it saves.
    assert (other.measured, other.deterministic, other.saving_us) == (near, False, None)
    assert other.distance == replace(BIG, m=1500).distance(near)
    assert found.find(replace(BIG, m=511)) is None  # more than a factor of 4 from either
    assert found.find(replace(BIG, k=4100)) is None  # rows of A off the kernel's alignment
    assert found.find(replace(BIG, batch=2)) is None
    assert found.find(replace(BIG, layout=Layout.NT)) is None


def test_a_neighbour_that_is_added_to() -> None:
    """Kernels are those of the operation without the addition, which is a launch's beta."""
    sums = replace(BIG, dtype="bf16.out_f32.accumulate")
    config = replace(CONFIG, kernel=replace(KERNEL, dtype="bf16.out_f32"))
    found = snapshot(row(sums, config=config)).find(replace(sums, m=1500))
    assert found is not None
    assert found.config == config
    assert snapshot(row(sums, config=CONFIG)).find(replace(sums, m=1500)) is None


def test_an_illegal_neighbour_gives_way_to_the_next() -> None:
    split = replace(KERNEL, scheduler=TileScheduler.SPLIT_K)
    launch = Launch(decomposition=Decomposition.SPLIT_K, splits=7)
    illegal = row(replace(BIG, k=3584), config=Config(kernel=split, launch=launch, pack=PACK))
    choice = snapshot(illegal, row(replace(BIG, k=2048))).find(replace(BIG, k=3000 // 8 * 8))
    assert choice is not None
    assert choice.measured.k == 2048


@pytest.mark.parametrize(
    "known",
    [
        row(BIG, use=Use.CUBLAS),
        row(BIG, use=Use.CUBLAS, config=None),
        row(BIG, config=replace(CONFIG, pack=None)),
    ],
    ids=["cublas", "no candidate", "not compiled"],
)
def test_what_is_not_to_be_run_is_none_though_a_neighbour_could_be(known: Row) -> None:
    found = snapshot(known, row(replace(BIG, m=2048)))
    assert found.find(BIG) is None
    assert found.find(replace(BIG, m=4000)) is None
    assert found.find(replace(BIG, m=2000)) is not None


def test_the_same_winners_are_the_same_revision() -> None:
    rows = [row(BIG), row(replace(BIG, m=64))]
    one, other = snapshot(*rows), snapshot(*reversed(rows))
    assert one == other
    assert one.document == other.document
    assert hash(one) == hash(other)
    assert snapshot(rows[0]) != one
    assert Snapshot.of("nvidia-h100-132sm", rows) != one
    assert snapshot(row(BIG, config=replace(CONFIG, pack="b" * 64)), rows[1]) != one
    assert pickle.loads(pickle.dumps(one)) == one


def test_a_file_brings_it_back(tmp_path: Path) -> None:
    signer = Signer.create(tmp_path / "signing.key")
    kept = snapshot(row(BIG), row(replace(BIG, m=64), use=Use.CUBLAS), signer=signer)
    path = tmp_path / "a" / "winners.json"
    kept.save(path)
    found = Snapshot.load(path)
    assert (found.device, found.revision, found.rows) == (H200, kept.revision, kept.rows)
    assert found.packs() == (PACK,)
    assert found.check(Trusted([signer.public])) == signer.public
    assert [entry.name for entry in path.parent.iterdir()] == ["winners.json"]
    with pytest.raises(FileNotFoundError):
        Snapshot.load(tmp_path / "none")


@pytest.mark.parametrize(
    "change",
    [
        {"environment": "another"},
        {"config": replace(CONFIG, pack="b" * 64)},
        {"problem": replace(BIG, m=8192)},
        {"config": replace(CONFIG, launch=replace(CONFIG.launch, swizzle=2))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_signature_is_of_all_that_its_rows_say(tmp_path: Path, change: dict[str, object]) -> None:
    signer = Signer.create(tmp_path / "signing.key")
    signed, other = snapshot(row(BIG), signer=signer), snapshot(replace(row(BIG), **change))
    forged = json.loads(other.document) | {"signature": json.loads(signed.document)["signature"]}
    assert signed.revision == snapshot(row(BIG)).revision  # which does not cover it
    assert signed.tag != snapshot(row(BIG)).tag
    with pytest.raises(Untrusted, match="altered"):
        Snapshot.parse(json.dumps(forged, separators=(",", ":")).encode()).check(
            Trusted([signer.public])
        )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[: len(b) // 2], "not a snapshot"),
        (lambda b: b"", "not a snapshot"),
        (lambda b: b"\xff" + b, "not a snapshot"),
        (lambda b: b"[]", "not a snapshot"),
        (lambda b: b.replace(b'"m":4096', b'"m":0'), "revision"),
        (lambda b: b.replace(b'"m":4096', b'"m":4097'), "revision"),
        (lambda b: b.replace(PACK.encode(), b"c" * 64), "revision"),
        (lambda b: b.replace(H200.encode(), b"nvidia-h100-132sm"), "revision"),
        (lambda b: b.replace(b'"format":1', b'"format":2'), "format 2"),
    ],
)
def test_a_damaged_document_is_refused(tmp_path: Path, damage, message: str) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(damage(snapshot(row(BIG)).document))
    with pytest.raises(SnapshotCorrupt, match=message):
        Snapshot.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"use": "triton"},
        {"problem": {"dtype": "bf17"}},
        {"problem": {"epilogue": "relu"}},
        {"config": {"epilogue": "relu"}},
        {"config": {"kernel": {"backend": "triton"}}},
        {"config": {"kernel": {"dtype": "bf16.then_nothing_known"}}},
        {"config": {"kernel": {"warps": 8}}},
        {"config": {"kernel": {"scheduler": "by_weather"}}},
        {"config": {"launch": {"raster": "spiral"}}},
        {"config": {"launch": {"dynamic": True}}},
        {"config": {"launch": {"algorithm": {"library": 1, "code": "00", "tile": 5}}}},
    ],
    ids=str,
)
def test_a_winner_with_anything_not_known_here_is_left_out(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Never read as the plainer one that it would be without it; the others stay."""
    near = Problem(m=8192, n=4096, k=4096)
    odd = changed(msgspec.to_builtins(row(near)), change)
    found = Snapshot.parse(document(msgspec.to_builtins(row(BIG)), odd))
    assert (found.rows, found.skipped) == ((row(BIG),), 1)
    assert found.packs() == (PACK,)
    choice = found.find(near)
    assert choice is not None
    assert choice.measured == BIG
    [said] = caplog.messages
    assert "1 winners of snapshot" in said
    assert found.revision != snapshot(row(BIG)).revision  # of all rows, known here or not


def test_fields_of_a_newer_service_are_ignored() -> None:
    kept = snapshot(row(BIG))
    newer = msgspec.json.decode(kept.document) | {"made_by": "0.9"}
    assert Snapshot.parse(msgspec.json.encode(newer)) == kept
