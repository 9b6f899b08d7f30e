"""Winners files: a round trip, and refusing what is not whole."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gemmsmith.answers.answer import Ratio, Statistics
from gemmsmith.answers.history import Origin
from gemmsmith.core.config import Use
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.problem import DType, Problem
from gemmsmith.signing import Signer, Trusted
from tests.support.candidates import EXACT, PROBLEM, named
from tests.support.replacing import replace
from tests.support.serving import H200, winner
from tests.support.sqlite import empty_store
from tuner import places
from tuner.exchange import (
    SCHEMA,
    ExchangeError,
    Imported,
    export_winners,
    import_winners,
    read_winners,
    sign_winners,
    write_winners,
)
from tuner.store import Store
from tuner.store.statement import is_believed
from tuner.trial import Winner

FILES = Path(__file__).parent / "winners"
"""One file of each schema as that gemmsmith wrote it; a new schema adds one, none is changed."""

SHIPPED = places.shipped("configs/winners")

MADE_UP = Winner(
    problem=PROBLEM,
    device=DeviceModel(
        name="NVIDIA H200", arch="sm90", sm_count=132, memory_bytes=2**37, l2_bytes=60 * 2**20
    ),
    environment=Environment(
        gpu_uuid="GPU-1",
        driver="580",
        cuda="13.0",
        cutlass="4.2.0",
        compiler="V13.0.88",
        torch="2.11",
        cublas="13.1",
        gemmsmith="0.1.0",
    ),
    use=Use.CUTLASS,
    candidate=named("fast"),
    statistics=Statistics(median_us=10.0, ci_low_us=9.9, ci_high_us=10.1, samples=25),
    baseline=Statistics(median_us=11.0, ci_low_us=9.9, ci_high_us=10.1, samples=25),
    speedup=Ratio(median=1.1, ci_low=1.09, ci_high=1.11),
    correctness=EXACT,
    conditions=None,
    promoted_at="2026-11-21T00:00:00.000+00:00",
)
"""What is in the files of every schema: a kernel of that name there is none."""

KNOWN = Problem(m=4096, n=4096, k=4096)
WINNER = replace(winner(KNOWN), promoted_at="2026-11-21T00:00:00.000+00:00")
NOBODY = Trusted()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "one.db").write_bytes(empty_store())
    with Store.open(f"sqlite:///{tmp_path / 'one.db'}") as opened:
        yield opened


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.create(tmp_path / "signing.key", "ours")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "two.db").write_bytes(empty_store())
    with Store.open(f"sqlite:///{tmp_path / 'two.db'}") as opened:
        yield opened


def exported(store: Store, path: Path, *winners: Winner, signer: Signer | None = None) -> Path:
    """A file of these winners, which the store has measured."""
    store.signer = signer
    for each in winners or (WINNER,):
        store.promote(each)
    export_winners(store, path)
    return path


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.tf32.jsonl")), ids=lambda path: path.name)
def test_a_shipped_file_that_is_written_again_has_the_same_bytes(
    path: Path, tmp_path: Path
) -> None:
    write_winners(tmp_path / "again", read_winners(path))
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_exported_winners_come_back_as_they_were(
    store: Store, other: Store, signer: Signer, tmp_path: Path
) -> None:
    trusted = Trusted([signer.public])
    half = replace(winner(Problem(m=8, n=4096, k=4096, dtype=DType.FP16)), promoted_at="2026-11-21")
    path = exported(store, tmp_path / "out" / "winners.jsonl", WINNER, half, signer=signer)
    assert import_winners(other, path, trusted) == Imported(added=2, kept=0)
    stored = other.winner(KNOWN, H200.slug)
    assert stored == store.winner(KNOWN, H200.slug)
    assert stored is not None
    assert (stored.origin, stored.signature and stored.signature.key) == (
        Origin.IMPORTED,
        signer.public.id,
    )
    assert import_winners(other, path, trusted) == Imported(added=0, kept=2)
    again = tmp_path / "again.jsonl"
    export_winners(other, again)
    assert again.read_bytes() == path.read_bytes()


def test_a_file_without_cublas_kernels_and_prices_is_read_and_changes_nothing_twice(
    store: Store, tmp_path: Path
) -> None:
    path = exported(store, tmp_path / "winners.jsonl")
    text = path.read_bytes()
    newer = b'"baseline_kernels":[],"power_penalty":null,"regimes":[],"rivals":[],"spreads":[],'
    assert newer in text
    path.write_bytes(text.replace(newer, b""))
    assert read_winners(path) == [replace(WINNER, revision=1)]
    assert import_winners(store, path, NOBODY).added == 0
    assert len(store.history(KNOWN, H200.slug)) == 1


@pytest.mark.parametrize("schema", range(1, SCHEMA + 1))
def test_files_of_every_schema_so_far_are_read(schema: int) -> None:
    path = FILES / f"schema-{schema}.jsonl"
    assert [replace(found, baseline=MADE_UP.baseline) for found in read_winners(path)] == [
        replace(MADE_UP, revision=1)
    ]


def test_names_of_cublas_kernels_travel(store: Store, tmp_path: Path) -> None:
    told = replace(WINNER, baseline_kernels=("Memset (Device)", "nvjet"))
    path = exported(store, tmp_path / "winners.jsonl", told)
    assert read_winners(path) == [replace(told, revision=1)]


def test_an_import_never_replaces_what_was_measured_here(
    store: Store, signer: Signer, tmp_path: Path
) -> None:
    path = exported(store, tmp_path / "winners.jsonl", signer=signer)
    mine = store.promote(winner(KNOWN, us=5.0))
    assert import_winners(store, path, Trusted([signer.public])).kept == 1
    assert store.winner(KNOWN, H200.slug) == mine


def test_what_nobody_signed_is_kept_and_not_answered(
    store: Store, other: Store, tmp_path: Path
) -> None:
    path = exported(store, tmp_path / "winners.jsonl")
    for _ in range(2):
        assert import_winners(other, path, NOBODY) == Imported(added=0, kept=0, unbelieved=1)
        assert other.winner(KNOWN, H200.slug) is None
        assert other.near_winners(replace(KNOWN, m=2048), H200.slug) == []
        assert other.winners() == []
    assert [found.origin for found in other.unanswered()] == [Origin.UNSIGNED]
    assert len(other.audit.entries()) == 1
    [kept] = other.revisions(KNOWN, H200.slug)
    assert (kept.origin, kept.current) == (Origin.UNSIGNED, False)


def test_an_unknown_key_is_told_and_once_it_is_trusted_the_same_file_is_answered(
    store: Store, other: Store, signer: Signer, tmp_path: Path
) -> None:
    path = exported(store, tmp_path / "winners.jsonl", signer=signer)
    imported = import_winners(other, path, NOBODY)
    assert imported == Imported(added=0, kept=0, unbelieved=1, keys=(signer.public.id,))
    assert import_winners(other, path, Trusted([signer.public])).added == 1
    [kept] = other.revisions(KNOWN, H200.slug)
    assert (kept.origin, kept.current) == (Origin.IMPORTED, True)
    assert other.unanswered() == []


def test_what_nobody_signed_is_answered_where_that_is_wanted_until_there_is_better(
    store: Store, other: Store, signer: Signer, tmp_path: Path
) -> None:
    unsigned = exported(store, tmp_path / "unsigned.jsonl")
    assert import_winners(other, unsigned, NOBODY).unbelieved == 1
    assert import_winners(other, unsigned, NOBODY, unsigned=True).added == 1
    answered = other.winner(KNOWN, H200.slug)
    assert answered is not None
    assert answered.origin is Origin.UNSIGNED
    # Somebody believed measured it otherwise: nobody's word does not come back.
    trusted = Trusted([signer.public])
    believed = exported(store, tmp_path / "believed.jsonl", winner(KNOWN, us=20.0), signer=signer)
    assert import_winners(other, believed, trusted).added == 1
    third = exported(store, tmp_path / "third.jsonl", winner(KNOWN, us=1.0))
    assert import_winners(other, third, trusted, unsigned=True) == Imported(added=0, kept=1)
    current = other.winner(KNOWN, H200.slug)
    assert current is not None
    assert (current.origin, current.statistics) == (
        Origin.IMPORTED,
        winner(KNOWN, us=20.0).statistics,
    )


def test_a_forged_file_replaces_no_winner_that_is_believed(
    store: Store, other: Store, signer: Signer, tmp_path: Path
) -> None:
    trusted = Trusted([signer.public])
    path = exported(store, tmp_path / "winners.jsonl", signer=signer)
    import_winners(other, path, trusted)
    mine = other.winner(KNOWN, H200.slug)
    stranger = Signer.create(tmp_path / "stranger.key")
    forged = exported(store, tmp_path / "forged.jsonl", winner(KNOWN, us=1.0), signer=stranger)
    assert import_winners(other, forged, trusted).unbelieved == 1
    assert other.winner(KNOWN, H200.slug) == mine


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"median_us":10.0', b'"median_us":9.95'),
        (b'"driver":"580.95"', b'"driver":"580.96"'),
        (b'"samples":25', b'"samples":99'),
        (b'"max_clock_mhz":0', b'"max_clock_mhz":1980'),
        (b'"use":"cutlass"', b'"use":"cublas"'),
    ],
)
def test_a_winner_that_was_altered_after_it_was_signed_is_refused(
    before: bytes, after: bytes, store: Store, other: Store, signer: Signer, tmp_path: Path
) -> None:
    path = exported(store, tmp_path / "winners.jsonl", signer=signer)
    text = path.read_bytes()
    assert before in text
    path.write_bytes(text.replace(before, after, 1))
    with pytest.raises(ExchangeError, match=r"line 2: .*altered"):
        import_winners(other, path, Trusted([signer.public]), unsigned=True)
    assert other.counts()["problems"] == 0


def test_of_a_file_all_is_taken_or_nothing_and_every_bad_line_is_told(
    store: Store, other: Store, tmp_path: Path
) -> None:
    problems = [Problem(m=64 * m, n=4096, k=4096) for m in range(1, 41)]
    path = exported(store, tmp_path / "winners.jsonl", *map(winner, problems))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"splits":1', b'"splits":-3')
    lines[7] = lines[7].replace(b'"median":1.1', b'"median":1000000000.0')
    lines[9] = b"{]\n"
    lines[10] = b"[" * 100_000 + b"\n"
    lines[11] = lines[12]
    path.write_bytes(b"".join(lines))
    with pytest.raises(ExchangeError) as caught:
        import_winners(other, path, NOBODY, unsigned=True)
    said = str(caught.value).splitlines()
    numbers = [int(line.split(" line ")[1].split(":")[0]) for line in said[:-1]]
    assert numbers == [4, 8, 10, 11, 13]
    assert said[-1] == "nothing of this file was taken"
    assert (other.counts()["problems"], other.counts()["kernels"]) == (0, 0)
    path.write_bytes(lines[0] + b"{}\n" * 40)
    with pytest.raises(ExchangeError, match="and 20 more lines"):
        import_winners(other, path, NOBODY)


def test_a_release_signs_files_and_changes_nothing_else_in_them(
    store: Store, signer: Signer, tmp_path: Path
) -> None:
    path = exported(store, tmp_path / "winners.jsonl")
    before = path.read_bytes()
    assert sign_winners(path, signer) == 1
    after = path.read_bytes()
    assert re.sub(rb',"signature":{[^}]*}', b"", after) == before
    assert is_believed(read_winners(path)[0], Trusted([signer.public]))
    path.write_bytes(before.replace(b'"splits":1', b'"splits":-3'))
    with pytest.raises(ExchangeError, match="-3 splits"):
        sign_winners(path, signer)


def test_the_pack_that_was_measured_is_signed_and_this_machines_own_is_served(
    store: Store, other: Store, signer: Signer, tmp_path: Path
) -> None:
    trusted = Trusted([signer.public])
    packed = replace(WINNER, pack="c0ffee", job="job-1")
    path = exported(store, tmp_path / "winners.jsonl", packed, signer=signer)
    assert packed.candidate is not None
    other.add_pack("ad0be0", "toolchain", [packed.candidate.kernel], 1)
    import_winners(other, path, trusted)
    stored = other.winner(KNOWN, H200.slug)
    assert stored is not None
    assert (stored.pack, stored.job) == ("ad0be0", None)
    assert stored.signature is not None
    assert stored.signature.pack == "c0ffee"
    assert is_believed(stored, trusted)


def test_grouped_winners_are_exported_with_their_types(store: Store, tmp_path: Path) -> None:
    """As `tune --suite` finds them in one run."""
    store.promote(WINNER)
    for dtype in ("bf16.group_rows", "fp16.group_rows"):
        problem = Problem(m=64, n=128, k=256, batch=4, dtype=dtype)
        store.promote(winner(problem, use=Use.CUBLAS))
    path = tmp_path / "w.jsonl"
    assert export_winners(store, path, dtype=DType.BF16) == 2
    assert {one.problem.dtype for one in read_winners(path)} == {"bf16", "bf16.group_rows"}
    assert export_winners(store, path, dtype="fp16.group_rows") == 1


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
        (lambda text: b"[" * 100_000, "not a winners file"),
        (lambda text: text.replace(b'"schema":3', b'"schema":9'), "upgrade"),
        (lambda text: text.replace(b'"schema":3', b'"schema":0'), "schema 0"),
    ],
)
def test_a_damaged_file_is_refused_whole(  # type: ignore[no-untyped-def]
    store: Store, other: Store, tmp_path: Path, damage, says: str
) -> None:
    path = exported(store, tmp_path / "winners.jsonl")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ExchangeError, match=says):
        import_winners(other, path, NOBODY)
    assert other.counts()["problems"] == 0


MANGLED: dict[str, Callable[[bytes], bytes]] = {
    "a blank last line": lambda text: text + b"\n",
    "no last end of line": bytes.rstrip,
    "blank lines": lambda text: b"\n \n" + text.replace(b"\n", b"\n\t\n\n"),
    "DOS ends of lines": lambda text: text.replace(b"\n", b"\r\n") + b"\r\n",
    "a byte-order mark": lambda text: codecs.BOM_UTF8 + text,
    "a byte-order mark and DOS": lambda text: codecs.BOM_UTF8 + text.replace(b"\n", b"\r\n"),
}


@pytest.mark.parametrize("mangled", MANGLED)
def test_what_an_editor_adds_to_a_file_changes_nothing(
    mangled: str, store: Store, other: Store, tmp_path: Path, signer: Signer
) -> None:
    half = winner(Problem(m=8, n=4096, k=4096, dtype=DType.FP16))
    path = exported(store, tmp_path / "winners.jsonl", WINNER, half, signer=signer)
    before = read_winners(path)
    path.write_bytes(MANGLED[mangled](path.read_bytes()))
    assert read_winners(path) == before
    assert import_winners(other, path, Trusted([signer.public])) == Imported(added=2, kept=0)
    # A bad line is named by its number in the file as it is.
    lines = path.read_bytes().splitlines()
    bad = max(number for number, line in enumerate(lines) if line.strip())
    path.write_bytes(b"\n".join([*lines[:bad], b"{}", *lines[bad + 1 :]]))
    with pytest.raises(ExchangeError, match=f"line {bad + 1}: "):
        read_winners(path)
    path.write_bytes(b"\n".join(lines[:bad]))
    with pytest.raises(ExchangeError, match="truncated"):
        read_winners(path)


def test_a_missing_file_is_an_error_that_names_it(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match=r"none\.jsonl"):
        import_winners(store, tmp_path / "none.jsonl", NOBODY)
