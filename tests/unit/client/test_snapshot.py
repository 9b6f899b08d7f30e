"""Snapshots: their choices, and that a revision identifies its winners."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gemmsmith import Config, Launch, Layout, Problem, Use
from gemmsmith.answers.snapshot import Row, Snapshot
from gemmsmith.core.kernel import TileScheduler
from gemmsmith.core.launch import Decomposition
from gemmsmith.errors import SnapshotCorrupt, Untrusted
from gemmsmith.signing import Signer, Trusted
from tests.support.candidates import KERNEL
from tests.support.replacing import replace
from tests.support.snapshots import BIG, CONFIG, H200, PACK, document, row, snapshot

GELU = replace(BIG, dtype="bf16.then_bias_gelu_tanh")
"""A problem for which kernels of neighbours on both sides may run: they save memory passes."""
GELU_CONFIG = replace(CONFIG, kernel=replace(KERNEL, dtype=GELU.dtype))


def changed(fields: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The fields with the change applied, also to nested fields."""
    inner = {
        name: changed(fields.get(name, {}), value) if isinstance(value, dict) else value
        for name, value in change.items()
    }
    return fields | inner


def test_the_exact_winner_comes_first_then_the_nearest_legal_one() -> None:
    near = replace(GELU, m=2048)
    winners = snapshot(
        row(GELU, config=GELU_CONFIG, saving_us=7.5),
        row(near, config=GELU_CONFIG, deterministic=False, saving_us=3.0),
        row(replace(GELU, m=1024), config=GELU_CONFIG),
    )
    exact = winners.find(GELU)
    assert exact is not None
    assert (exact.config, exact.measured, exact.distance, exact.deterministic) == (
        GELU_CONFIG, GELU, 0.0, True,
    )  # fmt: skip
    other = winners.find(replace(GELU, m=1500))
    assert other is not None
    assert exact.saving_us == 7.5
    # A neighbour's kernel was not measured for this problem, so its saving is unknown.
    assert (other.measured, other.deterministic, other.saving_us) == (near, False, None)
    assert other.distance == replace(GELU, m=1500).distance(near)
    assert winners.find(replace(GELU, m=1000)) is None  # smaller than all measured problems
    assert winners.find(replace(GELU, k=4100)) is None  # rows of A off the kernel's alignment
    assert winners.find(replace(GELU, layout=Layout.TT)) is None


@pytest.mark.parametrize(
    ("dtype", "m", "batch", "runs"),
    [
        ("bf16", 2048, 1, False),
        ("bf16.then_bias", 2048, 1, False),
        ("bf16.then_bias_residual", 2048, 1, False),
        ("bf16.then_bias_gelu_tanh", 2048, 1, True),
        ("bf16.then_silu_gate_aux", 2048, 1, True),
        ("bf16.then_bias_gelu_tanh", 256, 1, False),  # too little work
        ("bf16.then_bias_gelu_tanh", 1100, 1, False),  # too far
        ("bf16.group_rows", 1100, 8, True),  # more tokens, and nothing else
    ],
)
def test_few_neighbours_kernels_are_run(dtype: str, m: int, batch: int, runs: bool) -> None:
    few, many = (128, 300) if m == 256 else (1024, 4096)
    measured = Problem(m=many, n=4096, k=4096, batch=batch, dtype=dtype)
    config = replace(CONFIG, kernel=replace(KERNEL, dtype=dtype))
    winners = snapshot(row(measured, config=config), row(replace(measured, m=few), config=config))
    asked = replace(measured, m=m)
    assert (winners.find(asked) is not None) is runs
    assert (winners.row_for(asked) is not None) is runs
    assert winners.find(measured) is not None


OTHER = replace(GELU_CONFIG, kernel=replace(GELU_CONFIG.kernel, name="another"))


@pytest.mark.parametrize(
    ("rows", "runs"),
    [
        ([(2048, 4096, 4096, GELU_CONFIG), (8192, 4096, 4096, GELU_CONFIG)], True),
        ([(4096, 2048, 2048, GELU_CONFIG), (4096, 6144, 6144, GELU_CONFIG)], True),
        ([(4096, 4096, 2048, GELU_CONFIG), (8192, 6144, 4096, GELU_CONFIG)], True),
        ([(8192, 4096, 4096, GELU_CONFIG)], False),
        ([(2048, 4096, 4096, GELU_CONFIG)], False),
        # SmolLM2's gates and those of a larger model: all winners are larger, or all are smaller.
        ([(m, 6144, 5120, GELU_CONFIG) for m in (4096, 8192)], False),
        ([(m, 2048, 4096, GELU_CONFIG) for m in (2048, 4096)], False),
        # Larger in M and smaller in N: neither problem is larger or smaller as a whole.
        ([(2048, 6144, 4096, GELU_CONFIG), (8192, 2048, 4096, GELU_CONFIG)], False),
        ([(2048, 4096, 4096, GELU_CONFIG), (8192, 4096, 4096, OTHER)], False),
        ([(3000, 4096, 4096, GELU_CONFIG), (2048, 4096, 4096, OTHER), (8192, 4096, 4096, OTHER)],
         False),
        ([(2048, 4096, 4096, GELU_CONFIG), (16384, 4096, 4096, GELU_CONFIG)], False),  # too far
        ([(2048, 4096, 4096, GELU_CONFIG), (8192, 4096, 4096, None)], False),  # cuBLAS won
    ],
)  # fmt: skip
def test_a_neighbours_kernel_has_won_on_both_sides(
    rows: list[tuple[int, int, int, Config | None]], runs: bool
) -> None:
    winners = snapshot(
        *(
            row(
                replace(GELU, m=m, n=n, k=k),
                use=Use.CUBLAS if config is None else Use.CUTLASS,
                config=config,
            )
            for m, n, k, config in rows
        )
    )
    assert (winners.find(replace(GELU, m=4096, n=4096, k=4096)) is not None) is runs


def test_no_neighbour_answers_for_a_weight_gradient_of_experts() -> None:
    """Weight gradients are slower with a neighbour's kernel, unlike forward products."""
    sums = Problem(
        m=2048, n=768, k=32768, batch=128,
        dtype="bf16.out_f32.group_depth.accumulate", layout=Layout.NT,
    )  # fmt: skip
    kernel = replace(KERNEL, dtype="bf16.out_f32.group_depth", layout=Layout.NT)
    winners = snapshot(row(sums, config=replace(CONFIG, kernel=kernel)))
    assert winners.find(sums) is not None
    assert winners.find(replace(sums, k=16384)) is None


def test_an_illegal_neighbour_gives_way_to_the_next() -> None:
    split = replace(GELU_CONFIG.kernel, scheduler=TileScheduler.SPLIT_K)
    launch = Launch(decomposition=Decomposition.SPLIT_K, splits=7)
    illegal = row(replace(GELU, k=3584), config=Config(kernel=split, launch=launch, pack=PACK))
    legal = row(replace(GELU, k=2048), config=GELU_CONFIG)
    choice = snapshot(illegal, legal).find(replace(GELU, k=3000 // 8 * 8))
    assert choice is not None
    assert choice.measured.k == 2048


@pytest.mark.parametrize(
    "known",
    [
        row(GELU, use=Use.CUBLAS, config=GELU_CONFIG),
        row(GELU, use=Use.CUBLAS, config=None),
        row(GELU, config=replace(GELU_CONFIG, pack=None)),
    ],
    ids=["cublas", "no candidate", "not compiled"],
)
def test_a_default_winner_is_none_even_if_a_neighbour_could_run(known: Row) -> None:
    winners = snapshot(
        known, *(row(replace(GELU, m=m), config=GELU_CONFIG) for m in (1024, 2048, 8192))
    )
    assert winners.find(GELU) is None
    assert winners.find(replace(GELU, m=4000)) is None
    assert winners.find(replace(GELU, m=2000)) is not None


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
    loaded = Snapshot.load(path)
    assert (loaded.device, loaded.revision, loaded.rows) == (H200, kept.revision, kept.rows)
    assert loaded.packs() == (PACK,)
    assert loaded.check(Trusted([signer.public])) == signer.public
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
    assert signed.revision == snapshot(row(BIG)).revision  # a revision does not cover the signature
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
        {"problem": {"dtype": "bf16.sum_by_weather"}},
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
    """It is not read as the plain winner without that part. The other winners stay."""
    near, known = replace(GELU, m=8192), row(GELU, config=GELU_CONFIG)
    other = row(replace(GELU, m=16384), config=GELU_CONFIG)
    odd = changed(msgspec.to_builtins(row(near, config=GELU_CONFIG)), change)
    parsed = Snapshot.parse(document(*map(msgspec.to_builtins, (known, other)), odd))
    assert (parsed.rows, parsed.skipped) == ((known, other), 1)
    assert parsed.packs() == (PACK,)
    choice = parsed.find(near)
    assert choice is not None
    assert choice.measured == GELU
    [said] = caplog.messages
    assert "1 winners of snapshot" in said
    assert (
        parsed.revision != snapshot(known, other).revision
    )  # the revision covers all rows, also unknown ones


def test_fields_of_a_newer_service_are_ignored() -> None:
    kept = snapshot(row(BIG))
    newer = msgspec.json.decode(kept.document) | {"made_by": "0.9"}
    assert Snapshot.parse(msgspec.json.encode(newer)) == kept
