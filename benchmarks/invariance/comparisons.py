"""Random comparisons: a row of a product has the same bits at every M, in every way to multiply.

    python -m benchmarks.invariance.comparisons --winners FILE -o bits.json [--fp8]
    python -m benchmarks.invariance.comparisons --same bits-h100.json bits-h200.json

For each weight of configs/suites/invariant.toml, one product of all rows is the reference. Each
comparison multiplies a random number of random rows in a random way, and compares every bit on the
GPU. A hash of the reference's first rows is kept: `--same` compares those of several machines. The
operands are the same everywhere. A weight without a winner is an error of its row, and the status
is 1 if there is one, or a difference.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import gemmsmith
from benchmarks.invariance import SUITE
from benchmarks.invariance.values import bits, drawn, hashed
from benchmarks.turns import described, keep, settle
from gemmsmith.core.operation import Grouping, Layout
from tuner.suites import load

COMPARISONS, FP8_COMPARISONS = 10_000, 2_000
MOST_ROWS = 16_384
GRADIENT_ROWS = 4096
EXPERT_ROWS = 256
HASHED_ROWS = 64
MANY_COLUMNS = 100_000
"""A model's head: it has no bias, and its results with and without one would not fit on a GPU."""
LARGE_RESULT = 2**27
"""Elements: 256 MiB of bf16."""
EXAMPLES = 5

Way = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies rows, which are named by their numbers; [rows, N]."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight [n, k] of the suite; with `groups` > 1 that of each expert.

    Attributes:
        pairs: whether products of two batch entries are tuned as well.
        gradients: whether the products of both gradients are.
    """

    name: str
    n: int
    k: int
    groups: int = 1
    pairs: bool = False
    gradients: bool = False

    def __str__(self) -> str:
        of = f"{self.groups}×" if self.groups > 1 else ""
        return f"{self.name} {of}{self.n}×{self.k}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is compared of a weight.

    Attributes:
        rows: how many rows there are to choose from.
        references: results of all rows: [rows, N].
        ways: for each way its function, and the number of its reference.
        further: results that are only hashed.
    """

    rows: int
    references: Sequence[torch.Tensor]
    ways: dict[str, tuple[Way, int]]
    further: Sequence[torch.Tensor] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare everything; 0 if all bits are equal and every weight was compared."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--winners", help="a bundle or a URL")
    parser.add_argument("--fp8", action="store_true", help="FP8 with factors of rows")
    parser.add_argument("--number", type=int, help="comparisons (default: 10,000; FP8: 2,000)")
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--same", type=Path, nargs="+", metavar="FILE", help="compare hashes only")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    if options.same:
        return same(options.same)
    if not (options.winners and options.output):
        parser.error("--winners and -o are needed")
    gemmsmith.use(options.winners, numerics="invariant")
    number = options.number or (FP8_COMPARISONS if options.fp8 else COMPARISONS)
    with gemmsmith.patch():
        return compare(weights(options.fp8), number, options)


def weights(fp8: bool) -> list[Weight]:
    """The weights of the suite, each once; for FP8 without experts and heads."""
    chosen: dict[tuple[int, int, int], str] = {}
    pairs, gradients = set(), set()
    for entry, problem in load(SUITE).problems("bf16.sum_sequential"):
        n, k, grouped = problem.n, problem.k, entry.grouping is Grouping.ROWS
        if problem.operation.is_fused:
            continue
        if problem.layout is Layout.TT:
            gradients.add((k, n))
        elif problem.layout is Layout.TN and problem.batch > 1 and not grouped:
            pairs.add((n, k))
        elif problem.layout is Layout.TN and not (fp8 and (grouped or n > MANY_COLUMNS)):
            name = entry.origin.removesuffix(" forward")
            chosen.setdefault((n, k, problem.batch), name)
    return [
        Weight(
            name=name,
            n=n,
            k=k,
            groups=groups,
            pairs=groups == 1 and (n, k) in pairs,
            gradients=groups == 1 and (n, k) in gradients and n <= MANY_COLUMNS,
        )
        for (n, k, groups), name in chosen.items()
    ]


def compare(
    chosen: Sequence[Weight], number: int, options: argparse.Namespace, rows: int = MOST_ROWS
) -> int:
    """Make `number` comparisons, a share for each weight; write a row for each."""
    result = described(options.device) | {"seed": options.seed, "weights": []}
    draw = random.Random(options.seed)
    totals: Counter[str] = Counter()
    for place, weight in enumerate(chosen):
        share = number * (place + 1) // len(chosen) - number * place // len(chosen)
        began = time.monotonic()
        row: dict[str, Any] = {"weight": str(weight)}
        try:
            row |= compared(weight, share, draw, options, rows)
        except RuntimeError as error:  # as NotInvariant is, and too little memory
            row["error"] = str(error)
        totals["comparisons"] += sum(row.get("compared", {}).values())
        totals["different"] += sum(row.get("different", {}).values())
        totals["errors"] += "error" in row
        result["totals"] = dict(totals)
        keep(
            result, "weights", row | {"seconds": round(time.monotonic() - began, 2)}, options.output
        )
    print(json.dumps(result["totals"]), flush=True)
    return int(totals["different"] > 0 or totals["errors"] > 0)


def compared(
    weight: Weight, number: int, draw: random.Random, options: argparse.Namespace, rows: int
) -> dict[str, Any]:
    """Make comparisons of a weight, and return their counts by way, and differences.

    Raises:
        RuntimeError: there is no winner for the weight, or too little memory.
    """
    settle(options.device, forget=True)
    made = case(weight, options, rows)
    differ = torch.zeros(number, dtype=torch.bool, device=options.device)
    taken: list[tuple[str, int]] = []
    generator = torch.Generator(options.device).manual_seed(options.seed)
    for place in range(number):
        name = draw.choice(list(made.ways))
        way, which = made.ways[name]
        # The first ones are of one row and of all, the others of as many octaves as there are.
        octaves = draw.uniform(0.0, made.rows.bit_length() - 1)
        m = (1, made.rows)[place] if place < 2 else int(2**octaves)
        if name == "bmm":
            m += m % 2
        # Tokens of experts are sorted by expert, and some are all of the first one's.
        limit = draw.choice((made.rows, made.rows // weight.groups))
        chosen = torch.randint(limit, (m,), device=options.device, generator=generator)
        if weight.groups > 1:
            chosen = chosen.sort().values
        y, expected = way(chosen), made.references[which][chosen]
        torch.any(bits(y) != bits(expected), out=differ[place])
        taken.append((name, m))
    others = [taken[place] for place in differ.nonzero().flatten().tolist()]
    return {
        "compared": dict(Counter(name for name, _ in taken)),
        "different": dict(Counter(name for name, _ in others)),
        "examples": others[:EXAMPLES],
        "hashes": [hashed(all_[:HASHED_ROWS]) for all_ in (*made.references, *made.further)],
    }


def case(weight: Weight, options: argparse.Namespace, rows: int) -> Case:
    """Draw the operands of a weight, and compute its references."""
    if weight.groups > 1:
        return _of_experts(weight, options.device)
    return (_of_fp8 if options.fp8 else _of_layer)(weight, options.device, rows)


def _of_layer(weight: Weight, device: str, rows: int) -> Case:
    x, w = drawn(rows, weight.k, 1, device), drawn(weight.n, weight.k, 2, device)
    bias = drawn(1, weight.n, 3, device)[0]

    def linear(chosen: torch.Tensor) -> torch.Tensor:
        return functional.linear(x[chosen], w)

    def compiled(chosen: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _compiled()(x[chosen], w)
        return y

    ways: dict[str, tuple[Way, int]] = {
        "mm": (lambda chosen: torch.mm(x[chosen], w.t()), 0),
        "linear": (linear, 0),
        "compiled": (compiled, 0),
    }
    references = [torch.mm(x, w.t())]
    if weight.n < MANY_COLUMNS:
        ways["addmm"] = (lambda chosen: torch.addmm(bias, x[chosen], w.t()), 1)
        ways["linear with bias"] = (lambda chosen: functional.linear(x[chosen], w, bias), 1)
        references.append(torch.addmm(bias, x, w.t()))
    if weight.pairs:
        both = torch.stack([w, w]).transpose(1, 2)
        ways["bmm"] = (
            lambda chosen: torch.bmm(x[chosen].view(2, -1, weight.k), both).flatten(0, 1),
            0,
        )
    if device != "cpu":
        ways["graph"] = (lambda chosen: _in_graph(x[chosen], w), 0)
    further: list[torch.Tensor] = []
    if weight.gradients:
        dy = drawn(rows, weight.n, 4, device)
        ways["input gradient"] = (lambda chosen: torch.mm(dy[chosen], w), len(references))
        references.append(torch.mm(dy, w))
        # A weight's gradient depends on all tokens: only machines can be compared.
        further.append(torch.mm(dy[:GRADIENT_ROWS].t(), x[:GRADIENT_ROWS]))
    return Case(rows=rows, references=references, ways=ways, further=further)


@cache
def _compiled() -> Any:
    # Sizes that equal each other, and single rows, are graphs of their own.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(functional.linear, dynamic=True)


def _in_graph(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Capture and replay a product; without `torch.cuda.graph`, which empties torch's cache.

    A large result needs that: memory that is cached cannot be freed within a capture.
    """
    functional.linear(x, w)  # the first call of a size chooses its kernel
    torch.cuda.synchronize()
    if x.shape[0] * w.shape[0] > LARGE_RESULT:
        torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        graph.capture_begin()
        try:
            y = functional.linear(x, w)
        finally:
            graph.capture_end()
        bits(y).zero_()
        graph.replay()
    torch.cuda.synchronize()
    return y


def _of_fp8(weight: Weight, device: str, rows: int) -> Case:
    kind = torch.float8_e4m3fn
    x, w = (
        drawn(count, weight.k, seed, device).to(kind) for seed, count in ((1, rows), (2, weight.n))
    )
    of_x = drawn(rows, 1, 3, device).float().abs() + 0.5
    of_w = drawn(1, weight.n, 4, device).float().abs() + 0.5

    def scaled(chosen: torch.Tensor) -> torch.Tensor:
        taken = bits(x)[chosen].view(kind)
        return torch._scaled_mm(
            taken, w.t(), of_x[chosen], of_w, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    every = torch.arange(rows, device=device)
    return Case(rows=rows, references=[scaled(every)], ways={"scaled_mm": (scaled, 0)})


def _of_experts(weight: Weight, device: str, rows: int = EXPERT_ROWS) -> Case:
    """A row is a token of an expert; the references are products of the experts, one by one."""
    x = drawn(rows, weight.k, 1, device)
    w = drawn(weight.groups * weight.n, weight.k, 2, device).view(-1, weight.n, weight.k)
    reference = torch.cat([torch.mm(x, w[expert].t()) for expert in range(weight.groups)])

    def grouped(chosen: torch.Tensor) -> torch.Tensor:
        experts = torch.arange(weight.groups, device=device)
        ends = torch.searchsorted(chosen // rows, experts, right=True).int()
        return functional.grouped_mm(x[chosen % rows], w.transpose(1, 2), offs=ends)

    every = weight.groups * rows
    return Case(rows=every, references=[reference], ways={"grouped_mm": (grouped, 0)})


def same(files: Sequence[Path]) -> int:
    """Compare the hashes of several machines' files; 0 if all are equal and there are any."""
    documents = [json.loads(file.read_text()) for file in files]
    tables = [{row["weight"]: row.get("hashes") for row in d["weights"]} for d in documents]
    common = [name for name in tables[0] if all(table.get(name) for table in tables)]
    different = [name for name in common if any(t[name] != tables[0][name] for t in tables)]
    for name in different:
        print(f"{name}: " + ", ".join(str(table[name]) for table in tables))
    machines = ", ".join(document["device"] for document in documents)
    print(f"{machines}: {len(common) - len(different)} of {len(common)} weights have equal bits")
    return int(bool(different) or not common)


if __name__ == "__main__":
    sys.exit(main())
