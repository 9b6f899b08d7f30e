"""Additional checks of this API for Schemathesis; loaded by SCHEMATHESIS_HOOKS."""

from __future__ import annotations

import json
import re

import schemathesis

UNSAYABLE = {
    "device": "which ones there are",
    "after": "which jobs there are",
    "revision": "which ones the problem has had",
    "layout": "which ones an element type has kernels for",
    "fields": "which columns the list has",
    "query": "that m, n and k belong together",
    "dtype": "which outputs and scalings an element type goes with",
    "groups": "which groupings it belongs to",
    "batch": "how many groups a grouping has at most",
    **dict.fromkeys(("out", "scaling", "grouping", "epilogue", "accumulate"), "what goes together"),
}
"""Fields that may be rejected although they match the description, and the reasons that a JSON
Schema cannot express."""

_WHOLE_FLOAT = re.compile(r"must be an integer, got -?[0-9.e+]+$")  # to JSON Schema an integer
_MEMORY = "fit in"


@schemathesis.check
def refused_for_what_cannot_be_described(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """A request that matches the description is rejected only for reasons it cannot express.

    It replaces Schemathesis's own `positive_data_acceptance`, which accepts every 422 or no 422.
    """
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    assert response.status_code not in (400, 405, 406, 413), "what is described is refused"
    if response.status_code != 422:
        return
    document = json.loads(response.content)
    if document["type"].endswith(":idempotency-key-reused"):
        return
    for error in document["errors"]:
        assert (
            error["field"] in UNSAYABLE
            or _WHOLE_FLOAT.match(error["message"])
            or _MEMORY in error.get("accepted", "")
        ), document["detail"]


@schemathesis.check
class EveryOperationSucceeds:
    """Each operation succeeded at least once, because otherwise it has not been tested.

    Operations with a name in their path are excluded: Schemathesis guesses a name only by chance.
    """

    def __init__(self) -> None:
        self._tried: set[str] = set()
        self._succeeded: set[str] = set()

    def after_response(
        self,
        ctx: schemathesis.CheckContext,
        response: schemathesis.Response,
        case: schemathesis.Case,
    ) -> None:
        if "{" not in case.operation.label:
            self._tried.add(case.operation.label)
        if 200 <= response.status_code < 300:
            self._succeeded.add(case.operation.label)

    def after_run(self, ctx: schemathesis.CheckContext) -> None:
        never = self._tried - self._succeeded
        assert not never, f"only ever refused: {', '.join(sorted(never))}"
