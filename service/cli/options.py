"""The options that commands share, as records; and how their words become the program's types.

Precedence everywhere: option, then environment variable `GEMMSMITH_…`, then default. A shell
completes their values from closed lists, and from files on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import update_wrapper
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from gemmsmith.core.names import named_layout
from gemmsmith.core.numerics import with_numerics
from gemmsmith.core.operation import Layout, of_dtype
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.errors import InvalidProblem
from service.cli.output import MisuseError, Result

if TYPE_CHECKING:
    from service.settings import Settings


def _values(all_of: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    # The list is made only when the user presses Tab.
    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")  # `--dtype bf16,fp`
        return [f"{before}{comma}{value}" for value in all_of() if value.startswith(last)]

    return complete


def _members(module: str, name: str) -> Callable[[str], list[str]]:
    # The module is imported only for a completion.
    return _values(lambda: list(getattr(import_module(module), name)))


def _slugs() -> list[str]:
    """Device models that have shipped winners."""
    from tuner import places

    files = places.shipped("configs/winners").glob("*.jsonl")
    return sorted({file.name.partition(".")[0] for file in files})


def _devices() -> Iterable[str]:
    from tuner import places

    sweeps = places.shipped("configs/sweeps").glob("*.jsonl.zst")
    return ["cuda:0", *sorted({f"replay:{file.name.partition('.')[0]}" for file in sweeps})]


def _suites() -> Iterable[str]:
    from tuner import places

    shipped = (file.stem for file in places.shipped("configs/suites").glob("*.toml"))
    return sorted({*shipped, *map(str, Path().glob("*.toml"))})


complete_dtypes = _members("gemmsmith.core.operation", "DType")
complete_numerics = _members("gemmsmith.core.numerics", "Numerics")
complete_layouts = _members("gemmsmith.core.operation", "Layout")
complete_efforts = _members("gemmsmith.core.tuning", "Effort")
complete_states = _members("gemmsmith.core.tuning", "JobState")
complete_levels = _members("tuner.backends", "Level")
complete_architectures = _members("tuner.arch", "ARCHITECTURES")
complete_scopes = _members("tuner.store.keys", "Scope")
complete_actions = _members("tuner.store.audit", "Action")
complete_phases = _members("tuner.trial", "Phase")
complete_formats = _members("service.tables", "FileFormat")
complete_slugs = _values(_slugs)
complete_devices = _values(_devices)
complete_suites = _values(_suites)


def extent(text: str | int) -> int:
    """A size as typed; its range is checked by `Problem`."""
    try:
        return int(text)
    except ValueError:
        raise MisuseError(
            f"M, N and K must be integers in 1 … {MAX_EXTENT}, got {text!r}"
        ) from None


def _size(name: str, text: str) -> Any:
    return typer.Argument(metavar=name, help=text, parser=extent)


_M = _size("M", "Rows of A and D; or all three sizes in one word, 4096x6144x1024.")
_N = _size("N", "Columns of B and D.")
_K = _size("K", "Columns of A, rows of B.")
DTypeName = Annotated[
    str,
    typer.Option(
        help="Element types: bf16, fp16, fp8_e4m3, fp8_e5m2, int8 or tf32.",
        autocompletion=complete_dtypes,
    ),
]
LayoutName = Annotated[
    str | None,
    typer.Option(
        help="A and B, t row-major, n column-major: tn (linear layer; the default), tt, nt or nn.",
        autocompletion=complete_layouts,
    ),
]
NumericsName = Annotated[
    str | None,
    typer.Option(
        help="invariant: a row has the same bits at every M (adds sum_sequential to the type).",
        autocompletion=complete_numerics,
    ),
]
Batch = Annotated[int, typer.Option(help="Independent products of this shape.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Database = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Database (GEMMSMITH_DATABASE; else gemmsmith.db among the user's data).",
    ),
]
Packs = Annotated[
    Path | None,
    typer.Option(
        "--packs",
        help="Folder of compiled kernel packs (GEMMSMITH_PACKS; else among the user's data).",
    ),
]
Sweeps = Annotated[
    Path | None,
    typer.Option(help="Folder of recorded sweeps (GEMMSMITH_SWEEPS; else the shipped ones)."),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        help="Device to measure on: cuda:0, or replay:NAME for a recorded GPU "
        "(GEMMSMITH_DEVICE; else the local GPU, else the recorded one).",
        autocompletion=complete_devices,
    ),
]
DeviceSlug = Annotated[
    str | None,
    typer.Option(
        help="Device model, such as h200; default: the local GPU, else GEMMSMITH_DEFAULT_MODEL.",
        autocompletion=complete_slugs,
    ),
]
OnlyDevice = Annotated[
    str | None,
    typer.Option(help="Only this device model, such as h200.", autocompletion=complete_slugs),
]
OnlyDType = Annotated[
    str | None, typer.Option(help="Only these element types.", autocompletion=complete_dtypes)
]
OnlyDTypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        "--dtypes",
        help="Only these element types; repeatable, or with commas. Default: all.",
        autocompletion=complete_dtypes,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(envvar="GEMMSMITH_URL", help="Use this service instead of the local database."),
]
LevelName = Annotated[
    str,
    typer.Option(
        help="core: the curated kernels; full: every legal one.", autocompletion=complete_levels
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number.")]
CompiledOnly = Annotated[
    bool, typer.Option("--compiled-only", help="Only kernels compiled before: no waiting for nvcc.")
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Parallel compilers; default: by cores and memory.")
]
Unsigned = Annotated[
    bool | None, typer.Option("--unsigned", help="Also serve winners without a trusted signature.")
]


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """The options of one problem."""

    m: Annotated[int, _M]
    n: Annotated[int, _N]
    k: Annotated[int, _K]
    dtype: DTypeName = "bf16"
    layout: LayoutName = None
    batch: Batch = 1
    numerics: NumericsName = None

    @property
    def problem(self) -> Problem:
        sizes = self.m, self.n, self.k
        problem = problem_of(*sizes, batch=self.batch, dtype=self.dtype, layout=self.layout)
        return with_numerics(problem, self.numerics)


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """M N K of a command that also does without them."""

    m: Annotated[int | None, _M] = None
    n: Annotated[int | None, _N] = None
    k: Annotated[int | None, _K] = None

    def three(self, instead: str) -> tuple[int, int, int]:
        """All three sizes; `instead` ends the error with what the command also takes."""
        if self.m is None or self.n is None or self.k is None:
            count = 3 - (self.m, self.n, self.k).count(None)
            raise MisuseError(f"three sizes M N K are needed, got {count}; {instead}")
        return self.m, self.n, self.k


@dataclass(frozen=True, kw_only=True)
class OptionalProblemOptions(SizeOptions):
    """The options of one problem, of a command that also does without M N K."""

    dtype: DTypeName = "bf16"
    layout: LayoutName = None
    batch: Batch = 1
    numerics: NumericsName = None

    def problem(self, instead: str) -> Problem:
        """The problem; `instead` is as of `three`."""
        sizes = self.three(instead)
        problem = problem_of(*sizes, batch=self.batch, dtype=self.dtype, layout=self.layout)
        return with_numerics(problem, self.numerics)


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Where answers and jobs are: at a service, else in a database of this machine."""

    url: Url = None
    database: Database = None

    @property
    def words(self) -> Sequence[str]:
        if self.url:
            return ("--url", self.url)
        return ("--database", self.database) if self.database else ()


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where this installation keeps what it knows."""

    database: Database = None
    packs: Packs = None
    sweeps: Sweeps = None

    def settings(self, **others: Any) -> Settings:
        return load_settings(**vars(self), **others)


def flattened(function: Callable[..., Result | None]) -> Callable[..., None]:
    """A command whose every option is a parameter, as typer reads them.

    The function takes records: the fields of each become options at the record's place. If it
    returns a `Result`, the command has the option `--json`, and prints the result.
    """
    records: dict[str, type] = {}
    parameters: list[Parameter] = []
    declared = signature(function, eval_str=True)
    for parameter in declared.parameters.values():
        record = parameter.annotation
        if not is_dataclass(record):
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        records[parameter.name] = parameter.annotation
        hints = get_type_hints(record, include_extras=True)
        for field in fields(record):
            default = Parameter.empty if field.default is MISSING else field.default
            kind, annotation = Parameter.KEYWORD_ONLY, hints[field.name]
            parameters.append(Parameter(field.name, kind, default=default, annotation=annotation))
    prints = declared.return_annotation is Result
    if prints:
        json = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)
        parameters.append(json)

    def command(**options: Any) -> None:
        as_json = prints and options.pop("as_json")
        filled = {
            name: record(**{field.name: options.pop(field.name) for field in fields(record)})
            for name, record in records.items()
        }
        result = function(**filled, **options)
        if result is not None:
            result.print(as_json)
            if result.failed:
                raise typer.Exit(1)

    update_wrapper(command, function)
    # typer reads the signature for the options and the annotations for their types.
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def load_settings(**overrides: Any) -> Settings:
    from service.settings import Settings  # pydantic: not every command needs it

    return Settings.load(**overrides)


def problem_of(m: int, n: int, k: int, *, batch: int, dtype: str, layout: str | None) -> Problem:
    """The problem that these words name; `dtype` may end in the layout, as `bf16.nt`.

    Raises:
        InvalidProblem: names the field and what it accepts.
    """
    from gemmsmith.http import requests

    name, own = named_layout(dtype)
    if own and layout and own != layout.lower():
        raise InvalidProblem("layout", f"the layout of {dtype} is {own}, but --layout is {layout}")
    layout = own or layout or Layout.TN
    return requests.problem_of(m, n, k, batch=batch, dtype=name, layout=layout)


def typed(problem: Problem) -> str:
    batch = f" --batch {problem.batch}" if problem.batch > 1 else ""
    sizes = f"{problem.m} {problem.n} {problem.k}"
    return f"{sizes} --dtype {problem.dtype} --layout {problem.layout}{batch}"


def dtypes_of(names: list[str]) -> list[str]:
    """Element types by name, also comma-separated, each once.

    Raises:
        MisuseError: names what is accepted.
    """
    dtypes: dict[str, None] = {}
    for name in ",".join(names).split(","):
        try:
            dtypes[of_dtype(name.strip()).dtype] = None
        except InvalidProblem as error:
            raise MisuseError(str(error)) from None
    return list(dtypes)
