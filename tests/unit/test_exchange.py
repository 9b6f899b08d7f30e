"""Winners files: a round trip, and refusing what is not whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmsmith.answer import Ratio, Statistics, Use
from gemmsmith.device import DeviceModel, Environment
from gemmsmith.problem import DType
from tests.support.candidates import EXACT, PROBLEM, named
from tests.support.replacing import replace
from tuner.exchange import SCHEMA, ExchangeError, export_winners, import_winners, read_winners
from tuner.store import Store
from tuner.trial import Winner

FILES = Path(__file__).parent / "winners"
"""One file of each schema as that gemmsmith wrote it; a new schema adds one, none is changed."""

MODEL = DeviceModel(
    name="NVIDIA H200", arch="sm90", sm_count=132, memory_bytes=2**37, l2_bytes=60 * 2**20
)
ENVIRONMENT = Environment(
    gpu_uuid="GPU-1",
    driver="580",
    cuda="13.0",
    cutlass="4.2.0",
    compiler="V13.0.88",
    torch="2.11",
    cublas="13.1",
    gemmsmith="0.1.0",
)
TIME = Statistics(median_us=10.0, ci_low_us=9.9, ci_high_us=10.1, samples=25)
WINNER = Winner(
    problem=PROBLEM,
    device=MODEL,
    environment=ENVIRONMENT,
    use=Use.CUTLASS,
    candidate=named("fast"),
    statistics=TIME,
    baseline=replace(TIME, median_us=11.0),
    speedup=Ratio(median=1.1, ci_low=1.09, ci_high=1.11),
    correctness=EXACT,
    conditions=None,
    promoted_at="2026-11-21T00:00:00.000+00:00",
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'one.db'}", create=True) as opened:
        yield opened


def test_exported_winners_come_back_as_they_were(store: Store, tmp_path: Path) -> None:
    store.promote(WINNER)
    store.promote(replace(WINNER, problem=replace(PROBLEM, m=7, dtype=DType.FP16)))
    path = tmp_path / "out" / "winners.jsonl"
    assert export_winners(store, path) == 2
    with Store.open(f"sqlite:///{tmp_path / 'two.db'}", create=True) as other:
        assert import_winners(other, path).added == 2
        assert other.winner(PROBLEM, MODEL.slug) == replace(WINNER, revision=1)
        assert import_winners(other, path).added == 0
        again = tmp_path / "again.jsonl"
        export_winners(other, again)
        assert again.read_bytes() == path.read_bytes()


def test_a_file_without_cublas_kernels_and_prices_is_read_and_changes_nothing_twice(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "winners.jsonl"
    store.promote(WINNER)
    export_winners(store, path)
    text = path.read_bytes()
    newer = b'"baseline_kernels":[],"power_penalty":null,"regimes":[],"rivals":[],"spreads":[],'
    assert newer in text
    path.write_bytes(text.replace(newer, b""))
    assert read_winners(path) == [replace(WINNER, revision=1)]
    assert import_winners(store, path).added == 0
    assert len(store.history(PROBLEM, MODEL.slug)) == 1


@pytest.mark.parametrize("schema", range(1, SCHEMA + 1))
def test_files_of_every_schema_so_far_are_read(schema: int, store: Store) -> None:
    path = FILES / f"schema-{schema}.jsonl"
    assert read_winners(path) == [replace(WINNER, revision=1)]
    assert import_winners(store, path).added == 1


def test_names_of_cublas_kernels_travel(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "winners.jsonl"
    told = replace(WINNER, baseline_kernels=("Memset (Device)", "nvjet"))
    store.promote(told)
    export_winners(store, path)
    assert read_winners(path) == [replace(told, revision=1)]


def test_an_import_never_replaces_what_was_measured_here(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "winners.jsonl"
    store.promote(WINNER)
    export_winners(store, path)
    mine = store.promote(replace(WINNER, candidate=named("mine")))
    assert import_winners(store, path).kept == 1
    assert store.winner(PROBLEM, MODEL.slug) == mine


def test_one_precision_can_be_exported_alone(store: Store, tmp_path: Path) -> None:
    store.promote(WINNER)
    assert export_winners(store, tmp_path / "w.jsonl", dtype=DType.FP16) == 0
    assert read_winners(tmp_path / "w.jsonl") == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: b"", "is empty"),
        (lambda text: text[: len(text) // 2], "line 2"),
        (lambda text: text.splitlines(keepends=True)[0], "truncated"),
        (lambda text: b'{"hello": 1}\n', "not a winners file"),
        (lambda text: text.replace(b'"schema":3', b'"schema":9'), "upgrade"),
        (lambda text: text.replace(b'"schema":3', b'"schema":0'), "schema 0"),
    ],
)
def test_a_damaged_file_is_refused_whole(store: Store, tmp_path: Path, damage, says: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "winners.jsonl"
    store.promote(WINNER)
    export_winners(store, path)
    path.write_bytes(damage(path.read_bytes()))
    with Store.open(f"sqlite:///{tmp_path / 'two.db'}", create=True) as other:
        with pytest.raises(ExchangeError, match=says):
            import_winners(other, path)
        assert other.winners() == []


def test_a_missing_file_is_an_error_that_names_it(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match=r"none\.jsonl"):
        import_winners(store, tmp_path / "none.jsonl")
