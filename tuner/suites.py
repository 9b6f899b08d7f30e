"""Problem suites: the matrix products of real models' layers, read from configs/suites/*.toml.

They come with the program; a shipped suite can be named without its path: `llm`.

A suite names *layers* (out features N, in features K, tokens, passes) and *problems* (M, N, K and
layout as they are). A linear layer with weight W[out, in] gives, for T tokens:

    forward          tn   M = T     N = out   K = in
    input_gradient   tt   M = T     N = in    K = out
    weight_gradient  nt   M = out   N = in    K = T

With `weight = "in_out"` it is W[in, out], as GPT-2's of transformers:

    forward          tt   M = T     N = out   K = in
    input_gradient   tn   M = T     N = in    K = out
    weight_gradient  nt   M = in    N = out   K = T

A layer of experts says `groups`, how many there are: each has such a weight, and T tokens are
divided among them. A problem that is grouped says `grouping` (rows or depth) and `groups`.

A layer or a problem may say `numerics = "invariant"`, or the file for all of them: its operation is
then the one with an order of sums (`gemmsmith.core.numerics`).

A layer says in `epilogues` what follows its forward product, one problem for each of them (`none`:
the bare product), or backward ones that follow its input gradient; a problem says it in `epilogue`.

A suite is for any element type; `Suite.problems(dtype)` leaves out problems that the type does not
support (FP8 is `tn` only). A problem with a `dtype` is for that type alone, as captured ones are.
Layers and problems say in `output` the element type of D if it is not the type's own: `e4m3`. A
problem may say `calls`, how often it is run; if it is listed twice, the calls add up. Bad files
raise SuiteError with the entry's place and what it should hold.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any

from gemmsmith.core.choices import member
from gemmsmith.core.numerics import Numerics, with_numerics
from gemmsmith.core.operation import (
    DType,
    Element,
    Epilogue,
    Grouping,
    Layout,
    Operation,
    in_order,
    layouts_of,
)
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.files import read_text
from gemmsmith.http.requests import calls_of
from tuner import places
from tuner.errors import TunerError


class SuiteError(TunerError):
    """A suite file that cannot be read; the message names the entry."""


class Stored(StrEnum):
    """How a linear layer's weight lies in memory, row by row."""

    OUT_IN = "out_in"  # nn.Linear
    IN_OUT = "in_out"  # transformers' Conv1D


class Pass(StrEnum):
    """Which product of a linear layer's training step."""

    FORWARD = "forward"  # y = x · Wᵀ
    INPUT_GRADIENT = "input_gradient"  # dx = dy · W
    WEIGHT_GRADIENT = "weight_gradient"  # dW = dyᵀ · x


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteProblem:
    """One matrix product and where it comes from: `llama-3-8b qkv forward`.

    `calls` is how often it is run; None if the file does not say. Of a grouped one `batch` is the
    number of groups. `dtype` is the one it is for, without grouping and epilogue; None for any.
    `output` is D's element type; None for that of `dtype`. `numerics` is demanded of `problem`.
    """

    m: int
    n: int
    k: int
    batch: int
    layout: Layout
    origin: str
    group: str
    calls: int | None = None
    grouping: Grouping = Grouping.NONE
    epilogue: Epilogue = Epilogue.NONE
    dtype: str | None = None
    output: Element | None = None
    numerics: Numerics | None = None

    def problem(self, dtype: str) -> Problem:
        """Its Problem in `dtype`; raises InvalidProblem if the type has no such operation."""
        operation = Operation.of(
            dtype,
            self.layout,
            out=self.output,
            grouping=None if self.grouping is Grouping.NONE else self.grouping,
            epilogue=None if self.epilogue is Epilogue.NONE else self.epilogue,
        )
        problem = Problem.of(operation, self.m, self.n, self.k, self.batch)
        return with_numerics(problem, self.numerics)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A named list of matrix products, each once."""

    name: str
    entries: tuple[SuiteProblem, ...]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The `dtype`s that its problems name; empty if all are for any type."""
        return in_order(entry.dtype for entry in self.entries if entry.dtype is not None)

    def problems(
        self, dtype: str, numerics: str | None = None
    ) -> list[tuple[SuiteProblem, Problem]]:
        """Every entry that `dtype` supports, with its problem.

        With `numerics`, only entries that have an order of sums. Those that demand one keep it.

        Raises:
            InvalidProblem: `dtype` does not exist, or there is no such `numerics`.
        """
        layouts_of(dtype)  # raises
        demanded = None if numerics is None else member("numerics", Numerics, numerics)
        supported = []
        for entry in self.entries:
            if entry.dtype not in (None, dtype):
                continue
            with suppress(InvalidProblem):
                problem = entry.problem(dtype)
                if problem.operation.summation is None:
                    problem = with_numerics(problem, demanded)
                supported.append((entry, problem))
        return supported


def shipped() -> Path:
    return places.shipped("configs/suites")


def _file(path: Path) -> Path:
    """The file itself; if it does not exist and is a name only, the shipped suite of that name."""
    known = shipped() / f"{path.name.removesuffix('.toml')}.toml"
    return known if path.name == str(path) and not path.exists() and known.is_file() else path


def load(path: Path) -> Suite:
    """Read a suite file, or the shipped suite of this name.

    Raises:
        SuiteError: missing file, bad TOML, or an invalid entry, which the message names.
    """
    try:
        data = tomllib.loads(read_text(_file(path)))
    except FileNotFoundError:
        names = ", ".join(sorted(file.stem for file in shipped().glob("*.toml")))
        raise SuiteError(f"no suite file {path}; {shipped()} holds {names}") from None
    except ValueError as error:
        raise SuiteError(f"{path} is not TOML: {error}") from None
    unknown = set(data) - {"name", "numerics", "layer", "problem"}
    if unknown:
        raise SuiteError(
            f"{path}: unknown keys {sorted(unknown)}; use name, numerics, layer, problem"
        )
    entries: dict[tuple[Any, ...], SuiteProblem] = {}
    for kind, expand in (("layer", _layer), ("problem", _problem)):
        for place, entry in enumerate(data.get(kind, []), 1):
            try:
                numerics = entry.get("numerics", data.get("numerics"))
                for item in expand(entry):
                    if numerics is not None:
                        item = replace(item, numerics=member("numerics", Numerics, numerics))
                    item.problem(item.dtype or _some_dtype(item))  # raises if it is invalid
                    extents = (item.m, item.n, item.k, item.batch)
                    words = (item.layout, item.grouping, item.epilogue, item.dtype, item.output)
                    identity = (*extents, *words, item.numerics)
                    known = entries.setdefault(identity, item)
                    if known is not item and item.calls is not None:
                        entries[identity] = replace(known, calls=(known.calls or 0) + item.calls)
            except (KeyError, ValueError, TypeError, InvalidProblem) as error:
                reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
                raise SuiteError(f"{path}: {kind} {place}: {reason}") from None
    if not entries:
        raise SuiteError(f"{path} holds no layer and no problem")
    return Suite(name=str(data.get("name", path.stem)), entries=tuple(entries.values()))


def _some_dtype(item: SuiteProblem) -> DType:
    return DType.FP8_E4M3 if item.output is Element.E4M3 else DType.BF16


def _layer(entry: Mapping[str, Any]) -> list[SuiteProblem]:
    if "calls" in entry:
        raise ValueError("calls goes with one product: list it as a [[problem]] too")
    out, inner, groups = entry["out"], entry["in"], entry.get("groups")
    passes = [Pass(name) for name in entry.get("passes", [Pass.FORWARD])]
    epilogues = [Epilogue(name) for name in entry.get("epilogues", [Epilogue.NONE])]
    backward = [bool(epilogue.backward) for epilogue in epilogues]
    followed = Pass.INPUT_GRADIENT if any(backward) else Pass.FORWARD
    if "epilogues" in entry and (passes != [followed] or any(backward) != all(backward)):
        raise ValueError(
            "epilogues follow the forward product, backward ones the input gradient: list other "
            "passes as another layer"
        )
    if Stored(entry.get("weight", Stored.OUT_IN)) is Stored.OUT_IN:
        rows, columns, forward, backwards = out, inner, Layout.TN, Layout.TT
    else:
        rows, columns, forward, backwards = inner, out, Layout.TT, Layout.TN
    problems = []
    for which, epilogue in product(passes, epilogues):
        grouping = Grouping.NONE
        if groups is not None:
            grouping = Grouping.DEPTH if which is Pass.WEIGHT_GRADIENT else Grouping.ROWS
        for tokens in entry["tokens"]:
            m, n, k, layout = {
                Pass.FORWARD: (tokens, out, inner, forward),
                Pass.INPUT_GRADIENT: (tokens, inner, out, backwards),
                Pass.WEIGHT_GRADIENT: (rows, columns, tokens, Layout.NT),
            }[which]
            problems.append(
                SuiteProblem(
                    m=m,
                    n=n,
                    k=k,
                    batch=1 if groups is None else groups,
                    layout=layout,
                    origin=f"{entry['model']} {entry['name']} {which}",
                    group=entry["model"],
                    grouping=grouping,
                    epilogue=epilogue,
                    output=_output(entry),
                )
            )
    return problems


def _problem(entry: Mapping[str, Any]) -> list[SuiteProblem]:
    grouping = Grouping(entry.get("grouping", Grouping.NONE))
    if "groups" in entry and (grouping is Grouping.NONE or "batch" in entry):
        raise ValueError("groups goes with grouping = rows or depth, and in place of batch")
    layout = Layout(entry.get("layout", "tn"))
    return [
        SuiteProblem(
            m=entry["m"],
            n=entry["n"],
            k=entry["k"],
            batch=entry.get("groups", entry.get("batch", 1)),
            layout=layout,
            origin=entry["name"],
            group=entry.get("group", "other"),
            calls=calls_of(entry["calls"]) if "calls" in entry else None,
            grouping=grouping,
            epilogue=Epilogue(entry.get("epilogue", Epilogue.NONE)),
            dtype=None if "dtype" not in entry else Operation.of(entry["dtype"], layout).dtype,
            output=_output(entry),
        )
    ]


def _output(entry: Mapping[str, Any]) -> Element | None:
    return Element(entry["output"]) if "output" in entry else None
