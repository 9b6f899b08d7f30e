"""`gemmsmith bake`: winners and packs in one file that a machine without a service can use."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import Result

from gemmsmith import Bundle, Client, Lookup, Problem, Use
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.launch import Launch
from gemmsmith.core.tuning import Effort
from gemmsmith.errors import PackUntrusted
from gemmsmith.program.captured import Captured
from gemmsmith.signing import Signer, trusted_folder
from service import documents, identity
from service.cli import of_run
from service.cli.output import counted
from service.settings import Settings
from tests.support import fake_nvcc
from tests.support.commands import run, use
from tests.support.machines import compile_, document, no_compiler
from tests.support.present import present
from tests.support.recordings import record
from tests.support.replacing import replace
from tests.support.serving import H100, H200, new_settings, packs_of, promote, running, winner
from tuner.backends import kernels
from tuner.compile import ArtifactStore
from tuner.store import Store
from tuner.store.database import Database

MEMBERS = kernels(Problem(m=64, n=64, k=64))[:5]
PROBLEMS = [Problem(m=64 << i, n=64, k=64) for i in range(4)]
STAYS = Problem(m=64, n=512, k=8192)
SUITE = """
name = "small"
problem = [
    {name = "first", m = 64, n = 64, k = 64},
    {name = "near the second", m = 130, n = 64, k = 64},
    {name = "cublas", m = 64, n = 512, k = 8192},
    {name = "far", m = 8192, n = 8192, k = 8192},
]
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Winners MEMBERS 0 … 3 on an H200 and one elsewhere; nothing is compiled."""
    made = use(new_settings(tmp_path), monkeypatch)
    monkeypatch.setattr("tuner.devices.local_gpu", lambda *_: None)
    toolchain = fake_nvcc.toolchain(tmp_path / "toolchain")
    monkeypatch.setattr("service.worker.builder.find_toolchain", lambda: toolchain)
    for member, problem in zip(MEMBERS, PROBLEMS, strict=False):
        candidate = Candidate(kernel=member, launch=Launch())
        promote(made, replace(winner(problem), candidate=candidate))
    unbuilt = Candidate(kernel=MEMBERS[4], launch=Launch())
    promote(made, replace(winner(STAYS, use=Use.CUBLAS), candidate=unbuilt))
    promote(made, winner(Problem(m=4096, n=4096, k=4096), device=H100))
    return made


def bake(*arguments: object, code: int = 0) -> Result:
    return run("bake", "--device", H200.slug, *arguments, code=code)


def test_all_winners_are_compiled_and_baked(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "out" / "w.gspack"
    text = bake("--winners", "-o", path).stdout
    bundle = Bundle.open(path, folder=tmp_path / "cache")
    packs = counted(len(bundle.snapshot.packs()), "pack")
    assert f"5 winners of {H200.slug}, 4 kernels in {packs}" in text
    assert f"{path.stat().st_size / 1e6:.1f} MB" in text
    assert bundle.snapshot.revision[:16] in text
    lookup = Lookup(bundle.snapshot, pin=True)
    for member, problem in zip(MEMBERS, PROBLEMS, strict=False):
        choice = present(lookup.lookup("bf16", "tn", problem.m, problem.n, problem.k))
        assert (choice.config.kernel, choice.distance) == (member, 0.0)
        assert choice.config.pack is not None
        content = bundle.packs.path(choice.config.pack).read_bytes()
        assert content == (settings.packs / f"{choice.config.pack}.so").read_bytes()
    assert lookup.lookup("bf16", "tn", STAYS.m, STAYS.n, STAYS.k) is None
    # The same winners, the same revision, wherever they come from; nothing is compiled twice.
    calls = fake_nvcc.calls(tmp_path / "toolchain")
    found = document(bake("--winners", "-o", path, "--json"))
    assert fake_nvcc.calls(tmp_path / "toolchain") == calls
    assert found["revision"] == bundle.snapshot.revision
    assert found["bytes"] == path.stat().st_size
    assert found["counts"] == {
        "winners": 5, "packs": len(bundle.snapshot.packs()), "kernels": 4, "without_winner": 0,
    }  # fmt: skip
    with running(settings) as http, Client(str(http.base_url), cache_dir=None) as client:
        served = client.snapshot(H200.slug)
        assert [row.problem for row in served.rows] == [row.problem for row in bundle.snapshot.rows]
        for problem in PROBLEMS:
            assert served.find(problem) == bundle.snapshot.find(problem)


def test_a_suite_of_one_problem_lacks_nothing_that_it_does_not_list(
    settings: Settings, tmp_path: Path
) -> None:
    """It is of any element type: a winner in one of them is a winner."""
    suite, path = tmp_path / "one.toml", tmp_path / "w.gspack"
    suite.write_text('[[problem]]\nname = "one"\nm = 64\nn = 64\nk = 64\n')
    result = bake("--suite", suite, "-o", path)
    assert "no winner" not in result.stderr
    assert f"1 winner of {H200.slug}, 1 kernel in 1 pack, " in result.stdout
    another = '[[problem]]\nname = "far"\nm = 8192\nn = 8192\nk = 8192\n'
    suite.write_text(suite.read_text() + another)
    assert "1 of the suite's 2 problems has no winner" in bake("--suite", suite, "-o", path).stderr
    counts = document(bake("--suite", suite, "-o", path, "--json"))["counts"]
    assert counts["without_winner"] == 1
    result = bake("--suite", suite, "-o", path, "--dtype", "bf16,fp16")
    assert "3 of the suite's 4 problems have no winner" in result.stderr


def test_a_run_counts_the_winners_that_are_new(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captured = Captured()
    captured.problems.update({PROBLEMS[0]: 3})
    recorded = Problem(256, 4096, 4096)
    settings.sweeps.mkdir()
    record(settings.sweeps, recorded)
    settings = settings.model_copy(update={"device": "replay:h200"})
    bundle = tmp_path / "next.gspack"
    winners = of_run.ProgramWinners(settings, bundle, None)
    assert of_run.tune(winners, captured, Effort.QUICK, None) == 0
    said = capsys.readouterr()
    assert "1 unrecorded" in said.out
    assert f"winners for the next run: 1, 0 of them new, in {bundle}" in said.err
    captured.problems.update({recorded: 3})
    assert of_run.tune(winners, captured, Effort.QUICK, None) == 0
    assert f"winners for the next run: 2, 1 of them new, in {bundle}" in capsys.readouterr().err


def test_a_run_opens_the_database_once_and_reads_what_answers(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = Captured()
    captured.problems.update({PROBLEMS[0]: 3})
    record(settings.sweeps, PROBLEMS[0])
    opened: list[str] = []

    class Counted(Database):
        def __init__(self, url: str) -> None:
            opened.append(url)
            super().__init__(url)

    def every_winner(*_: object, **__: object) -> list[object]:
        raise AssertionError("all winners are read")

    monkeypatch.setattr("tuner.store.store.Database", Counted)
    monkeypatch.setattr("tuner.store.winners.Winners.find", every_winner)
    kept = settings.model_copy(update={"device": f"replay:{H200.slug}"})
    winners = of_run.ProgramWinners(kept, tmp_path / "next.gspack", None)
    assert of_run.tune(winners, captured, Effort.QUICK, None) == 0
    assert opened == [settings.database]
    opened.clear()
    assert of_run.summary(winners, captured)[0].endswith("winners cover 100% of their time")
    assert opened == [settings.database]


def test_winners_near_a_programs_products_answer_as_all_do(settings: Settings) -> None:
    """A kernel that won below and above is run in between; other products need their own winner."""
    gated = [Problem(m=m, n=4096, k=4096, dtype="bf16.then_silu_gate") for m in (2048, 8192)]
    promote(settings, *(winner(problem, device=H200) for problem in gated))
    asked = [
        *(replace(gated[0], m=m) for m in (1024, 3072, 4096, 16384)),
        *(replace(gated[0], m=m, dtype="bf16.then_gelu_gate") for m in (2048, 4096)),
        *(replace(problem, m=m) for problem in (*PROBLEMS, STAYS) for m in (64, 96, 4096)),
    ]
    with Store.open(settings.database) as store:
        whole = documents.snapshot(
            H200.slug, store.winners(device=H200.slug), pack_of=lambda _: None
        )
        near = documents.snapshot(
            H200.slug, of_run.near(store, H200.slug, asked), pack_of=lambda _: None
        )
    rows = [whole.row_for(problem) for problem in asked]
    assert [near.row_for(problem) for problem in asked] == rows
    assert [row is not None for row in rows[:6]] == [False, True, True, False, False, False]
    assert len(near.rows) < len(whole.rows)


def test_a_suite_is_baked_with_what_answers_for_it(settings: Settings, tmp_path: Path) -> None:
    suite, path = tmp_path / "small.toml", tmp_path / "w.gspack"
    suite.write_text(SUITE)
    result = bake("--suite", suite, "-o", path, "--dtype", "bf16")
    assert "2 of the suite's 4 problems have no winner" in result.stderr
    snapshot = Bundle.open(path).snapshot
    assert {row.problem for row in snapshot.rows} == {PROBLEMS[0], STAYS}  # no neighbour's is run
    assert snapshot.find(PROBLEMS[0]) is not None
    assert snapshot.find(Problem(m=130, n=64, k=64)) is None
    assert len(ArtifactStore(settings.packs).packs()) == len(snapshot.packs())


def test_a_suites_grouped_problems_are_of_the_type_that_it_is_tuned_for(
    settings: Settings, tmp_path: Path
) -> None:
    experts = Problem(m=256, n=64, k=64, batch=4, dtype="bf16.group_rows")
    promote(settings, winner(experts, use=Use.CUBLAS))
    suite, path = tmp_path / "experts.toml", tmp_path / "w.gspack"
    suite.write_text("[[problem]]\nname='experts'\nm=256\nn=64\nk=64\ngrouping='rows'\ngroups=4\n")
    bake("--suite", suite, "-o", path, "--dtype", "bf16")
    assert [row.problem for row in Bundle.open(path).snapshot.rows] == [experts]


def test_winners_of_invariant_numerics_are_baked(settings: Settings, tmp_path: Path) -> None:
    ordered = [
        replace(problem, dtype=dtype)
        for problem, dtype in zip(
            PROBLEMS,
            ("bf16.sum_sequential", "fp16.sum_sequential", "bf16.sum_split_2"),
            strict=False,
        )
    ]
    for problem in ordered:
        candidate = Candidate(kernel=kernels(problem)[0], launch=Launch())
        promote(settings, replace(winner(problem), candidate=candidate))
    suite, path = tmp_path / "small.toml", tmp_path / "w.gspack"

    def baked(*words: object) -> list[Problem]:
        bake(*words, "-o", path)
        return sorted(row.problem for row in Bundle.open(path).snapshot.rows)

    demanded = ("--numerics", "invariant")
    assert baked("--winners", *demanded) == sorted(ordered[:2])
    assert baked("--winners", "--dtype", "bf16", *demanded) == ordered[:1]
    counts = document(compile_("--device", H200.slug, *demanded, "--json"))["counts"]
    assert counts["wanted"] == 2
    suite.write_text(SUITE)
    # It answers at every M, far or near.
    assert baked("--suite", suite, "--dtype", "bf16", *demanded) == ordered[:1]
    suite.write_text(f"numerics = 'invariant'\n{SUITE}")
    assert baked("--suite", suite, "--dtype", "bf16") == ordered[:1]
    assert baked("--suite", suite) == sorted(ordered[:2])


def test_only_kernels_that_winners_of_the_types_run_are_compiled(settings: Settings) -> None:
    promote(settings, winner(Problem(m=64, n=64, k=64, dtype="fp16")))
    assert document(compile_("--device", H200.slug, "--dtype", "bf16", "--json"))["counts"] | {
        "packs": 0
    } == {"wanted": 4, "fetched": 0, "compiled": 4, "cached": 0, "failed": 0, "packs": 0}
    counts = document(compile_("--device", H200.slug, "--dtype", "fp8_e4m3", "--json"))["counts"]
    assert counts["wanted"] == 0


def test_without_a_compiler_what_is_missing_is_counted(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = tmp_path / "unit.so"
    compiled.write_bytes(b"\x7fELF one")
    packs_of(settings).publish(compiled, MEMBERS[:1], fake_nvcc.toolchain(tmp_path / "elsewhere"))
    no_compiler(monkeypatch)
    result = bake("--winners", "-o", tmp_path / "w.gspack", code=1)
    assert "error: 3 of 4 winners' kernels are in no pack with a trusted signature" in result.stderr
    assert "Install one." in result.stderr
    assert "compile --winners --from URL" in result.stderr
    assert not (tmp_path / "w.gspack").exists()
    compiled.write_bytes(b"\x7fELF others")
    packs_of(settings).publish(compiled, MEMBERS[1:4], fake_nvcc.toolchain(tmp_path / "elsewhere"))
    assert "4 kernels in 2 packs" in bake("--winners", "-o", tmp_path / "w.gspack").stdout


def test_a_kernel_that_does_not_compile_is_named(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = fake_nvcc.toolchain(tmp_path / "bad", bad=[MEMBERS[2].name])
    monkeypatch.setattr("service.worker.builder.find_toolchain", lambda: bad)
    result = bake("--winners", "-o", tmp_path / "w.gspack", code=1)
    assert f"1 of 4 winners' kernels do not compile, first {MEMBERS[2].name}" in result.stderr
    assert not (tmp_path / "w.gspack").exists()


def test_it_is_signed_by_whoever_bakes(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.gspack"
    bake("--winners", "-o", path)
    bundle = Bundle.open(path, folder=tmp_path / "cache")
    for pack_hash in bundle.snapshot.packs():
        assert bundle.packs.path(pack_hash)
    assert bundle.snapshot.signature is not None
    assert bundle.snapshot.signature.key == identity.signer(settings).public.id
    monkeypatch.setenv("GEMMSMITH_TRUSTED", str(tmp_path / "nobody"))
    elsewhere = Bundle.open(path, folder=tmp_path / "cache")
    with pytest.raises(PackUntrusted, match="python -m gemmsmith trust"):
        elsewhere.packs.path(elsewhere.snapshot.packs()[0])


def test_packs_of_strangers_are_not_baked(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, named by the winner, and of this very toolchain: compiled again all the same."""
    compiled = tmp_path / "unit.so"
    compiled.write_bytes(b"\x7fELF a stranger's")
    stranger = Signer.create(tmp_path / "stranger.key")
    toolchain = fake_nvcc.toolchain(tmp_path / "toolchain")
    theirs = ArtifactStore(settings.packs, signer=stranger).publish(
        compiled, MEMBERS[:4], toolchain
    )
    candidate = Candidate(kernel=MEMBERS[0], launch=Launch())
    named = replace(winner(PROBLEMS[0]), candidate=candidate, pack=theirs.hash)
    promote(settings, named)
    path = tmp_path / "w.gspack"
    bake("--winners", "-o", path)
    assert theirs.hash not in Bundle.open(path).snapshot.packs()
    # Until somebody says whose it is.
    (trusted_folder() / "stranger.pub").write_text(stranger.public.line)
    try:
        bake("--winners", "-o", path)
        assert theirs.hash in Bundle.open(path).snapshot.packs()
    finally:
        (trusted_folder() / "stranger.pub").unlink()
    bake("--winners", "-o", path)
    assert theirs.hash not in Bundle.open(path).snapshot.packs()
    monkeypatch.setenv("GEMMSMITH_UNSIGNED", "1")
    bake("--winners", "-o", path)
    assert theirs.hash in Bundle.open(path).snapshot.packs()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --suite FILE or --winners"),
        (("--winners", "--suite", "x.toml"), "give --suite FILE or --winners"),
        (("--suite", "none.toml"), "no suite file none.toml"),
        (("--winners", "--dtype", "fp32"), "dtype must be one of"),
        (("--winners", "--numerics", "x"), "numerics must be one of invariant"),
    ],
)
def test_misuse(settings: Settings, tmp_path: Path, arguments: tuple[str], message: str) -> None:
    assert message in bake(*arguments, "-o", tmp_path / "w", code=2).stderr


def test_nothing_to_bake_is_an_error(settings: Settings, tmp_path: Path) -> None:
    result = bake("--winners", "--dtype", "fp16", "-o", tmp_path / "w", code=1)
    assert "no winner to bake" in result.stderr
