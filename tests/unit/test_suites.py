"""Suite files: what they expand to, and what they say when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmsmith.core.problem import DType, Layout
from gemmsmith.errors import InvalidProblem
from tuner.suites import SuiteError, load
from tuner.workloads.footprint import footprint_bytes

SUITES = Path(__file__).resolve().parents[2] / "configs" / "suites"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "suite.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("", [(Layout.TN, 7, 30, 20), (Layout.TT, 7, 20, 30), (Layout.NT, 30, 20, 7)]),
        (
            'weight = "in_out"',
            [(Layout.TT, 7, 30, 20), (Layout.TN, 7, 20, 30), (Layout.NT, 20, 30, 7)],
        ),
    ],
)
def test_a_layer_expands_to_the_three_products_of_a_training_step(
    tmp_path: Path, weight: str, expected: list[tuple[Layout, int, int, int]]
) -> None:
    suite = load(
        write(
            tmp_path,
            f"""
            [[layer]]
            model = "m"
            name = "l"
            {weight}
            out = 30
            in = 20
            tokens = [7]
            passes = ["forward", "input_gradient", "weight_gradient"]
            """,
        )
    )
    assert [(e.layout, e.m, e.n, e.k) for e in suite.entries] == expected


def test_a_layer_of_experts_expands_to_grouped_products(tmp_path: Path) -> None:
    suite = load(
        write(
            tmp_path,
            """
            [[layer]]
            model = "m"
            name = "l"
            out = 32
            in = 16
            groups = 4
            tokens = [64]
            passes = ["forward", "input_gradient", "weight_gradient"]

            [[problem]]
            name = "not grouped"
            m = 64
            n = 32
            k = 16
            batch = 4

            [[problem]]
            name = "as above"
            m = 64
            n = 32
            k = 16
            grouping = "rows"
            groups = 4
            """,
        )
    )
    assert [str(problem) for _, problem in suite.problems("bf16")] == [
        "4×64×32×16 bf16.group_rows tn",
        "4×64×16×32 bf16.group_rows tt",
        "4×32×16×64 bf16.group_depth nt",
        "4×64×32×16 bf16 tn",
    ]
    # What the type cannot do is left out.
    assert [str(problem) for _, problem in suite.problems("fp8_e4m3.scale_row")] == [
        "4×64×32×16 fp8_e4m3.scale_row.group_rows tn",
        "4×64×32×16 fp8_e4m3.scale_row tn",
    ]
    assert [str(problem) for _, problem in suite.problems("bf16.out_f32.accumulate")] == [
        "4×32×16×64 bf16.out_f32.group_depth.accumulate nt",
        "4×64×32×16 bf16.out_f32.accumulate tn",
    ]
    for dtype, says in (("bf17", "dtype must be one of"), ("bf16.accumulate", "needs out=f32")):
        with pytest.raises(InvalidProblem, match=says):
            suite.problems(dtype)


def test_a_layer_says_what_follows_its_forward_product(tmp_path: Path) -> None:
    suite = load(
        write(
            tmp_path,
            """
            [[layer]]
            model = "m"
            name = "up"
            out = 32
            in = 16
            tokens = [64]
            epilogues = ["none", "bias", "bias_gelu_tanh_aux"]

            [[problem]]
            name = "down"
            m = 64
            n = 16
            k = 32
            epilogue = "residual"

            [[problem]]
            name = "not the same"
            m = 64
            n = 16
            k = 32
            """,
        )
    )
    assert [str(problem) for _, problem in suite.problems("bf16")] == [
        "64×32×16 bf16 tn",
        "64×32×16 bf16.then_bias tn",
        "64×32×16 bf16.then_bias_gelu_tanh_aux tn",
        "64×16×32 bf16.then_residual tn",
        "64×16×32 bf16 tn",
    ]
    # What the type cannot do is left out.
    assert [str(problem) for _, problem in suite.problems("bf16.out_f32")] == [
        "64×32×16 bf16.out_f32 tn",
        "64×16×32 bf16.out_f32 tn",
    ]


def test_the_llm_suite_is_varied_and_has_no_problem_twice() -> None:
    suite = load(SUITES / "llm.toml")
    bf16 = [problem for _, problem in suite.problems(DType.BF16)]
    assert len(bf16) >= 60
    assert len(set(bf16)) == len(bf16)
    assert {p.layout for p in bf16} == {Layout.TN, Layout.TT, Layout.NT, Layout.NN}
    assert {1, 16, 64, 256, 1024, 4096, 8192} <= {p.m for p in bf16}
    assert all(p.layout is Layout.TN for _, p in suite.problems(DType.FP8_E4M3))


@pytest.mark.parametrize(
    ("name", "dtypes", "layouts", "least"),
    [
        ("int8", ("int8", "int8.out_bf16", "int8.out_bf16.scale_row"), {Layout.TN}, 60),
        (
            "weight_gradients_f32",
            ("bf16.out_f32.accumulate", "fp16.out_f32.accumulate", "bf16.out_f32"),
            {Layout.NT},
            35,
        ),
        ("tf32", ("tf32",), {Layout.TN, Layout.TT, Layout.NT}, 12),
        ("moe", ("bf16", "fp16"), {Layout.TN, Layout.TT, Layout.NT}, 80),
        ("experts", ("bf16", "fp16"), {Layout.TN, Layout.TT}, 25),
        ("fp8_rows", ("fp8_e4m3.scale_row",), {Layout.TN}, 45),
        ("fused", ("bf16", "fp16"), {Layout.TN, Layout.TT}, 130),
        ("conv1d", ("bf16", "fp16"), {Layout.TN, Layout.TT, Layout.NT}, 76),
        ("scaled_residual", ("bf16", "fp16", "fp8_e4m3"), {Layout.TN}, 30),
        ("muon", ("bf16.symmetric", "fp16.symmetric"), {Layout.TN, Layout.NT}, 25),
        ("gates_and_sums", ("bf16", "fp16"), {Layout.TN}, 26),
    ],
)
def test_suites_of_further_operations_fit_on_a_gpu_and_have_no_problem_twice(
    name: str, dtypes: tuple[str, ...], layouts: set[Layout], least: int
) -> None:
    suite = load(SUITES / f"{name}.toml")
    assert suite.name == name
    for dtype in dtypes:
        problems = [problem for _, problem in suite.problems(dtype)]
        assert len(problems) == len(suite.entries) >= least
        assert len(set(problems)) == len(problems)
        assert {p.layout for p in problems} == layouts
        assert max(footprint_bytes(p) for p in problems) < 80e9


def test_fp8_outputs_are_of_fp8_alone() -> None:
    suite = load(SUITES / "fp8_out.toml")
    problems = [problem for _, problem in suite.problems("fp8_e4m3")]
    assert len(set(problems)) == len(problems) == len(suite.entries) >= 20
    assert {p.operation.d.value for p in problems} == {"e4m3"}
    assert {64, 16384} <= {p.m for p in problems}
    assert max(footprint_bytes(p) for p in problems) < 80e9
    assert suite.problems("bf16") == []


def test_a_problem_says_its_output(tmp_path: Path) -> None:
    text = """
        [[problem]]
        name = "up"
        m = 64
        n = 32
        k = 16
        epilogue = "bias_gelu"

        [[problem]]
        name = "up"
        m = 64
        n = 32
        k = 16
        epilogue = "bias_gelu"
        output = "e4m3"
    """
    suite = load(write(tmp_path, text))
    assert [problem.dtype for _, problem in suite.problems("fp8_e4m3")] == [
        "fp8_e4m3.then_bias_gelu",
        "fp8_e4m3.out_e4m3.then_bias_gelu",
    ]
    for output, says in (("e4m4", "not a valid Element"), ("e5m2", "out must be one of")):
        with pytest.raises(SuiteError, match=says):
            load(write(tmp_path, text.replace("e4m3", output)))


def test_of_fused_layers_fp8_has_what_goes_forwards() -> None:
    suite = load(SUITES / "fused.toml")
    problems = [problem for _, problem in suite.problems("fp8_e4m3")]
    assert len(problems) == len({e for e in suite.entries if not e.epilogue.backward}) >= 100
    assert {p.layout for p in problems} == {Layout.TN}
    backwards = {e.epilogue.value for e in suite.entries if e.epilogue.backward}
    assert {"dgelu_tanh_bgrad", "dgelu_act", "dsilu_gate", "dsilu_gate_act"} <= backwards


LAYERS = """
[[layer]]
model = "m"
name = "first"
out = 64
in = 32
tokens = [8]
passes = ["forward", "weight_gradient"]
{word}
[[layer]]
model = "m"
name = "experts"
out = 64
in = 32
groups = 4
tokens = [16]
epilogues = ["none", "silu_gate"]
"""
IN_ORDER = 'numerics = "invariant"\n'


@pytest.mark.parametrize(
    ("text", "in_order"),
    [
        (LAYERS.format(word=""), 0),
        (LAYERS.format(word=IN_ORDER), 2),
        (IN_ORDER + LAYERS.format(word=""), 4),
        (IN_ORDER + LAYERS.format(word=IN_ORDER), 4),
    ],
)
def test_a_layer_or_the_whole_file_demands_numerics(
    tmp_path: Path, text: str, in_order: int
) -> None:
    suite = load(write(tmp_path, text))
    problems = [problem for _, problem in suite.problems("bf16")]
    assert [p.operation.summation == "sequential" for p in problems] == [
        place < in_order for place in range(4)
    ]
    demanded = [problem for _, problem in suite.problems("bf16", "invariant")]
    assert all(p.operation.summation == "sequential" for p in demanded)
    assert [p.operation.of_kernels for p in demanded] == [p.operation.of_kernels for p in problems]
    assert len(suite.problems("fp8_e4m3", "invariant")) == 0  # a factor for each operand
    with pytest.raises(InvalidProblem, match="numerics must be one of invariant"):
        suite.problems("bf16", "x")


def test_one_product_may_be_listed_with_and_without_an_order(tmp_path: Path) -> None:
    entry = "[[problem]]\nname='p'\nm=1\nn=2\nk=3\ncalls=2\n"
    suite = load(write(tmp_path, f"{entry}{entry}{IN_ORDER}{entry}{IN_ORDER}"))
    assert [(e.numerics, e.calls) for e in suite.entries] == [(None, 2), ("invariant", 4)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no layer and no problem"),
        ("oops", "is not TOML"),
        ("typo = 1", "unknown keys ['typo']"),
        ("[[problem]]\nname='p'\nm=1\nn=2", "problem 1: missing key 'k'"),
        ("[[problem]]\nname='p'\nm=0\nn=2\nk=3", "m must be in 1"),
        ("[[problem]]\nname='p'\nm=1\nn=2\nk=3\ngroups=4", "groups goes with grouping"),
        ("[[problem]]\nname='p'\nm=1\nn=2\nk=3\ngrouping='x'", "'x' is not a valid Grouping"),
        ("[[problem]]\nname='p'\nm=1\nn=2\nk=3\nepilogue='x'", "'x' is not a valid Epilogue"),
        (
            "[[layer]]\nmodel='m'\nname='l'\nout=8\nin=8\ntokens=[1]\nepilogues=['bias']\n"
            "passes=['forward', 'input_gradient']",
            "epilogues follow the forward product",
        ),
        (
            "[[layer]]\nmodel='m'\nname='l'\nout=8\nin=8\ntokens=[1]\nepilogues=['dgelu']",
            "backward ones the input gradient",
        ),
        (
            "[[layer]]\nmodel='m'\nname='l'\nout=8\nin=8\ntokens=[1]\n"
            "passes=['input_gradient']\nepilogues=['dgelu', 'bias']",
            "backward ones the input gradient",
        ),
        (
            "[[layer]]\nmodel='m'\nname='l'\nout=8\nin=8\ntokens=[1]\ngroups=2000",
            "there may be 1024 groups",
        ),
        (
            "[[layer]]\nmodel='m'\nname='l'\nout=8\nin=8\ntokens=[1]\nweight='x'",
            "'x' is not a valid Stored",
        ),
        ("[[problem]]\nname='p'\nm=1\nn=2\nk=3\nlayout='xx'", "'xx' is not a valid Layout"),
        (
            "numerics='x'\n[[problem]]\nname='p'\nm=1\nn=2\nk=3",
            "problem 1: numerics must be one of",
        ),
        (
            "[[problem]]\nname='p'\nm=1\nn=2\nk=3\nnumerics='invariant'\ndtype='tf32'",
            "problem 1: sum_sequential does not exist for this operation",
        ),
        (
            "numerics='invariant'\n[[layer]]\nmodel='m'\nname='l'\nout=8\nin=8\ntokens=[1]\n"
            "passes=['input_gradient']\nepilogues=['dgelu_bgrad']",
            "layer 1: sum_sequential does not exist for this operation",
        ),
    ],
)
def test_a_bad_suite_says_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SuiteError) as caught:
        load(write(tmp_path, text))
    assert says in str(caught.value)


def test_a_missing_suite_points_at_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="configs/suites"):
        load(tmp_path / "none.toml")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_suite_of_any_editor_is_read(mark: bytes, end: bytes, tmp_path: Path) -> None:
    lines = (
        b"",
        b'name = "mine"',
        b"[[problem]]",
        b'name = "x"',
        b"m = 1",
        b"n = 8",
        b"k = 8",
        b"",
    )
    path = tmp_path / "suite.toml"
    path.write_bytes(mark + end.join(lines) + end)
    suite = load(path)
    assert (suite.name, len(suite.entries)) == ("mine", 1)
    path.write_bytes(path.read_bytes().decode("utf-8-sig").encode("utf-16"))
    with pytest.raises(SuiteError, match="not UTF-8: save it in that encoding"):
        load(path)
