"""`GET /results` and `GET /winners`: trials, failed ones included, and current winners.

Both come page by page, as JSON or as tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from gemmsmith.core.device import called
from gemmsmith.http.replies import SCHEMA
from service import documents, tables
from service.errors import ProblemError, invalid_field
from service.http.access import Scope, needs
from service.http.parameters import winner_cursor
from service.http.requests import Format, ListQuery, ResultsQuery, WinnersQuery
from service.http.routes.paging import filled, next_page
from service.http.state import Service
from service.lookup.abilities import Asking
from service.lookup.cache import VARY
from tuner.trial import Winner

router = APIRouter(tags=["history"])

T = TypeVar("T")
# OpenAPI describes Accept by the media types of the answers.
Accept = Annotated[str, Header(include_in_schema=False)]

MEDIA_TYPES = {
    Format.JSON: "application/json",
    Format.CSV: "text/csv",
    Format.PARQUET: "application/vnd.apache.parquet",
}


@router.get("/results", dependencies=[needs(Scope.READ)])
def results(
    service: Service,
    asking: Asking,
    query: Annotated[ResultsQuery, Query()],
    accept: Accept = "*/*",
) -> Response:
    """Trials in the order they were recorded, as JSON, CSV or Parquet; `after` is a trial's id."""
    slugs = called(query.device or "", [model.slug for model in service.catalogue.known()])
    device = slugs[0] if len(slugs) == 1 else query.device
    read = functools.partial(
        service.store.trials,
        problem=query.problem(),
        device=device,
        dtype=query.dtype,
        layout=query.layout,
        phase=query.phase,
        job=query.job,
        limit=query.limit,
    )
    trials = filled(
        read,
        lambda stored: asking.reads(stored.trial.problem, stored.trial.candidate.kernel),
        cursor=lambda last: last.id,
        after=query.after,
        limit=query.limit,
    )
    return listing(
        "/results",
        "trials",
        query,
        accept,
        tables.TRIALS,
        trials,
        document=documents.trial,
        cursor=lambda last: last.id,
    )


@router.get("/winners", dependencies=[needs(Scope.READ)])
def winners(
    service: Service,
    asking: Asking,
    query: Annotated[WinnersQuery, Query()],
    accept: Accept = "*/*",
) -> Response:
    """Current winners of a GPU model, first tuned first, as JSON, CSV or Parquet."""
    device = service.catalogue.resolve(None, query.device)
    winners: list[Winner] = []
    if device is not None:
        # The next page is of the same device, whichever is the default by then.
        query = query.model_copy(update={"device": device.slug})
        read = functools.partial(
            service.store.winners,
            device=device.slug,
            dtype=query.whole_dtype,
            layout=query.layout,
            use=query.use,
            sizes=query.sizes,
            min_speedup=query.min_speedup,
            limit=query.limit,
        )
        winners = filled(
            read,
            lambda winner: asking.knows(winner.problem),
            cursor=lambda last: last.problem,
            after=query.after,
            limit=query.limit,
        )
    return listing(
        "/winners",
        "winners",
        query,
        accept,
        tables.WINNERS,
        [asking.report(winner) for winner in winners],
        document=documents.winner,
        cursor=lambda last: winner_cursor(last.problem),
    )


def listing(
    path: str,
    name: str,
    query: ListQuery,
    accept: str,
    table: tables.Table[T],
    records: Sequence[T],
    *,
    document: Callable[[T], Any],
    cursor: Callable[[T], object],
) -> Response:
    """A page of `records` as the query or the Accept header wants it, leading to the next one.

    In a JSON page `name` is the member that has the records, each as a `document` where no fields
    were chosen. `cursor` gives what `after` must be for the page behind a record.

    Raises:
        ProblemError: no such field, no such media type, or no pyarrow for Parquet.
    """
    form = query.format or _negotiated(accept)
    try:
        fields = table.choose(query.fields)
    except tables.UnknownField as error:
        raise invalid_field("fields", f"unknown: {error.name!r:.80}", error.accepted) from None
    following = next_page(path, query, records, cursor)
    headers = {"Vary": f"Accept, {VARY}", "Gemmsmith-Schema": str(SCHEMA)}
    if form is Format.JSON:
        chosen = query.fields is not None
        items = table.rows(records, fields) if chosen else map(document, records)
        return documents.page(name, items, following, headers)
    if following:
        headers["Link"] = f'<{following}>; rel="next"'
    try:
        content = table.write(table.rows(records, fields), fields, tables.FileFormat(form.value))
    except tables.ParquetMissing as error:
        raise ProblemError(
            status=501,
            kind="parquet-missing",
            title="Parquet is not available",
            detail=f"{error}. Until then: format=csv.",
        ) from None
    return Response(content, media_type=MEDIA_TYPES[form], headers=headers)


def _negotiated(accept: str) -> Format:
    """The format that an Accept header likes best; JSON of equals.

    Raises:
        ProblemError: none of ours.
    """
    ranges = weights(accept)

    def liked(form: Format) -> float:
        kind = MEDIA_TYPES[form]
        patterns = (kind, kind.split("/")[0] + "/*", "*/*")  # the most specific one counts
        return next((ranges[pattern] for pattern in patterns if pattern in ranges), 0.0)

    best = max(Format, key=liked)
    if ranges and not liked(best):
        raise ProblemError(
            status=406,
            kind="not-acceptable",
            detail=f"Accept: there is {', '.join(MEDIA_TYPES.values())}; or say format=.",
        )
    return best


def weights(accepted: str) -> dict[str, float]:
    """The weight of each choice of an `Accept` header; one that cannot be read is 1."""
    choices = {}
    for part in filter(str.strip, accepted.split(",")):
        choice, *parameters = (word.strip().lower() for word in part.split(";"))
        choices[choice] = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip() == "q":
                with suppress(ValueError):
                    choices[choice] = min(1.0, max(0.0, float(value)))
                break
    return choices
