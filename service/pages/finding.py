"""`/ui/find`: the overview's box leads to a problem, to a model, or to the list of problems."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter
from msgspec import Struct
from starlette.responses import Response

from gemmsmith.core.operation import Layout
from gemmsmith.core.problem import DType, Problem
from gemmsmith.errors import InvalidProblem
from service.http.access import Scope, needs
from service.http.parameters import Text
from service.http.state import Service
from service.pages import addresses
from service.pages.fields import page_query_of
from service.pages.render import see_other
from service.pages.search import SearchError, parse
from tuner.models import by_model

router = APIRouter(include_in_schema=False)


class Question(Struct, frozen=True):
    """A size or the name of a model, and a device model's slug."""

    q: Text = ""
    device: Text | None = None


@router.get(addresses.FIND, dependencies=[needs(Scope.READ)])
def find(service: Service, question: Annotated[Question, page_query_of(Question)]) -> Response:
    name = question.q.strip().lower()
    if name in by_model():
        return see_other(addresses.model(name, device=question.device))
    gpu = service.catalogue.resolve(None, question.device)
    if gpu is not None and (problem := _whole(question.q)):
        return see_other(addresses.problem(problem, gpu.slug))
    return see_other(addresses.with_query(addresses.PROBLEMS, q=question.q, device=question.device))


def _whole(text: str) -> Problem | None:
    """The problem that a text names, bf16 tn if it does not say which; None if sizes are open."""
    with suppress(SearchError, InvalidProblem):
        asks = parse(text)
        if asks.m and asks.n and asks.k and not asks.layers and not asks.extents:
            return Problem(
                m=asks.m, n=asks.n, k=asks.k, batch=asks.batch or 1,
                dtype=asks.dtype or DType.BF16, layout=asks.layout or Layout.TN,
            )  # fmt: skip
    return None
