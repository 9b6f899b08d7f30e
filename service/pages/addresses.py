"""The addresses of pages, and the problem that an address names."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from urllib.parse import quote, urlencode

from gemmsmith.core.problem import Problem, extents
from gemmsmith.errors import InvalidProblem
from service.errors import invalid_field

OVERVIEW = "/ui"
PROBLEMS = "/ui/problems"
FIND = "/ui/find"
JOBS = "/ui/jobs"
MAP = "/ui/map"
MODELS = "/ui/models"
TUNE = "/ui/tune"
DEVICES = "/ui/devices"

PLAIN = "plain"
"""The list's name for an operation whose `dtype` is a short name only, such as `bf16`."""


def problem(shown: Problem, device: str) -> str:
    sizes = str(shown).partition(" ")[0].replace("×", "x")
    return f"{PROBLEMS}/{quote(device, safe='')}/{shown.dtype}/{shown.layout}/{sizes}"


def problem_of(dtype: str, layout: str, sizes: str) -> Problem:
    """Return the problem that an address names.

    Raises:
        ProblemError: 422; it names the part of the address that is wrong.
    """
    if extents(sizes) is None:
        accepted = "M x N x K, such as 4096x6144x4096, or batch x M x N x K"
        raise invalid_field("sizes", f"cannot be read: {sizes!r:.80}", accepted)
    try:
        return Problem.parse(f"{sizes} {dtype} {layout}")
    except InvalidProblem as error:
        raise invalid_field(error.field, str(error)) from None


def job(job_id: str) -> str:
    return f"{JOBS}/{quote(job_id, safe='')}"


def tune(shown: Problem, device: str = "") -> str:
    return f"{TUNE}?{urlencode({**asdict(shown), 'device': device})}"


def winners_of(dtype: str, device: str) -> str:
    types, _, suffix = dtype.partition(".")
    return with_query(PROBLEMS, dtype=types, operation=suffix or PLAIN, device=device)


def model(name: str, **query: Any) -> str:
    return with_query(f"{MODELS}/{quote(name, safe='')}", **query)


def with_query(path: str, **values: Any) -> str:
    present = {name: value for name, value in values.items() if value not in (None, "")}
    return f"{path}?{urlencode(present)}" if present else path
