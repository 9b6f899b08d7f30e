"""`/ui/tune`: the form that requests a tuning job.

The request is that of `POST /tune`, with the same checks and limits. If a field is wrong, the form
comes back with what was typed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from gemmsmith.core.device import called
from gemmsmith.core.operation import DType
from gemmsmith.core.tuning import Effort
from gemmsmith.errors import InvalidProblem
from service.errors import FieldError, ProblemError, from_validation, invalid_field
from service.http.access import Caller
from service.http.requests import TuneBody
from service.http.routes import jobs as api
from service.http.state import Service, State
from service.pages import addresses
from service.pages.fields import Posted, Tuner
from service.pages.render import page, see_other

router = APIRouter(include_in_schema=False)

INTEGERS = ("m", "n", "k", "batch", "priority", "calls")
FIELDS = (*INTEGERS, "dtype", "layout", "effort", "device")
DEFAULTS = {
    name: str(field.default)
    for name, field in TuneBody.model_fields.items()
    if name in FIELDS and not field.is_required()
}

OFFERED = (*DType, "bf16.out_f32", "bf16.out_f32.accumulate")
"""The operations that the form offers, besides one that the address names."""


@router.get(addresses.TUNE)
def form(service: Service, caller: Tuner, request: Request) -> Response:
    return _form(service, caller, request.query_params)


@router.post(addresses.TUNE)
def order(service: Service, caller: Tuner, posted: Posted) -> Response:
    """Request the job and go to its page, or show the errors beside their fields."""
    try:
        reply = api.tune(service, caller, _body(posted))
    except InvalidProblem as error:
        problem = invalid_field(error.field, str(error))
    except ProblemError as error:
        problem = error
    else:
        return see_other("/ui" + reply.headers["location"])
    return _form(service, caller, posted, problem)


def _body(posted: Mapping[str, str]) -> TuneBody:
    """Make the request of a form's fields; empty ones take their defaults."""
    fields: dict[str, str | int] = {}
    for name in FIELDS:
        text = posted.get(name, "").strip()
        if text:
            fields[name] = _number(text) if name in INTEGERS else text
    try:
        return TuneBody.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error.errors()) from None


def _number(text: str) -> int | str:
    # The validation refuses the text.
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(text) < 20 else text


def _form(
    service: State, caller: Caller, values: Mapping[str, str], problem: ProblemError | None = None
) -> Response:
    errors: Sequence[FieldError] = problem.errors if problem else ()
    filled = {name: values.get(name, DEFAULTS.get(name, ""))[:200] for name in FIELDS}
    slugs = called(filled["device"], [model.slug for model in service.catalogue.known()])
    filled |= {"device": slugs[0]} if len(slugs) == 1 else {}
    beside = {error.field: error for error in errors if error.field in FIELDS}
    answer = page(
        "tune.html",
        status=problem.status if problem else 200,
        nav=addresses.TUNE,
        caller=caller,
        values=filled,
        another=[(filled["dtype"], filled["dtype"])] if filled["dtype"] not in OFFERED else [],
        errors=beside,
        problem=problem,
        efforts=tuple(Effort),
        devices=service.catalogue.known(),
    )
    answer.headers.update(problem.headers if problem else {})
    return answer
