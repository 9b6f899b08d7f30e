"""Where pages are, and what problem an address means."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from gemmsmith.core.problem import Problem, extents
from gemmsmith.errors import InvalidProblem
from service.http.errors import invalid_field

OVERVIEW = "/ui"
PROBLEMS = "/ui/problems"
JOBS = "/ui/jobs"
MAP = "/ui/map"
TUNE = "/ui/tune"
DEVICES = "/ui/devices"

PLAIN = "plain"
"""What the list calls an operation whose `dtype` is a short name and nothing else."""


def problem(found: Problem, device: str) -> str:
    """The page of a problem on the device model with that slug."""
    sizes = str(found).partition(" ")[0].replace("×", "x")
    return f"{PROBLEMS}/{quote(device, safe='')}/{found.dtype}/{found.layout}/{sizes}"


def problem_of(dtype: str, layout: str, sizes: str) -> Problem:
    """The problem that an address means.

    Raises:
        ProblemError: 422, naming what is wrong in it.
    """
    if extents(sizes) is None:
        accepted = "M x N x K, such as 4096x6144x4096, and batch x before them where there is one"
        raise invalid_field("sizes", f"cannot be read: {sizes!r:.80}", accepted)
    try:
        return Problem.parse(f"{sizes} {dtype} {layout}")
    except InvalidProblem as error:
        raise invalid_field(error.field, str(error)) from None


def job(job_id: str) -> str:
    """The page of a job."""
    return f"{JOBS}/{quote(job_id, safe='')}"


def tune(found: Problem, device: str = "") -> str:
    """The form that requests a tuning, filled in for a problem."""
    sizes = {"m": found.m, "n": found.n, "k": found.k, "batch": found.batch}
    kind = {"dtype": found.dtype, "layout": found.layout.value, "device": device}
    return f"{TUNE}?{urlencode({**sizes, **kind})}"


def winners_of(dtype: str, device: str) -> str:
    """The list of the winners of that `dtype`, in all layouts, on the device model."""
    types, _, further = dtype.partition(".")
    return with_query(PROBLEMS, dtype=types, operation=further or PLAIN, device=device)


def with_query(path: str, **values: Any) -> str:
    """`path` with those of the values that say something."""
    given = {name: value for name, value in values.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path
