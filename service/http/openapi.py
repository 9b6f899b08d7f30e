"""The OpenAPI description: FastAPI's, completed by what every route answers.

FastAPI knows the path and the headers that a route takes; its query or body is a struct, which
describes itself. What it answers is said here, in one table; refusals that follow from what a route
takes (keys, a body, a path with a name in it) are added to every route alike.
A route that is not in the table makes `describe` fail, so none is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from gemmsmith.core.problem import MAX_EXTENT
from service.errors import MEDIA_TYPE as PROBLEM
from service.errors import invalid_field
from service.http import examples, response_schemas
from service.http.access import BEARER
from service.http.lookup_routes import LookupRoute
from service.http.protocol import MAX_HEAD_BYTES, MAX_URL_BYTES
from service.http.questions import QuestionReader, integer_reason
from service.http.requests import ProblemBody
from service.http.response_schemas import ref
from service.lookup.abilities import RUNS_DESCRIPTION

Content = dict[str, Any]
Answers = dict[int, Content | None]
"""By status: the content, or None for no body and for refusals, which share the one they have."""

_PROBLEM: Content = {PROBLEM: {"schema": ref("ProblemDetails")}}
_BINARY: Content = {"schema": {"type": "string", "format": "binary"}}
_TEXT: Content = {"schema": {"type": "string"}}


def _json(name: str) -> Content:
    return {"application/json": {"schema": ref(name)}}


def _table(name: str) -> Content:
    return _json(name) | {"text/csv": _TEXT, "application/vnd.apache.parquet": _BINARY}


ANSWERS: dict[str, Answers] = {
    "GET /best": {200: _json("Answer"), 304: None, 404: None},
    "POST /best:batch": {200: _json("Batch")},
    "GET /explain": {200: _json("Explanation"), 404: None},
    "GET /snapshot": {200: _json("Snapshot"), 304: None, 404: None},
    "POST /tune": {200: _json("Job"), 202: _json("Job")},
    "GET /jobs": {200: _json("Jobs")},
    "GET /jobs/{job_id}": {200: _json("Job")},
    "DELETE /jobs/{job_id}": {202: _json("Job")},
    "POST /jobs/{job_id}/retry": {
        200: _json("Job"), 202: _json("Job"), 409: None,
    },
    "GET /jobs/{job_id}/events": {200: {"text/event-stream": {"schema": ref("Event")}}},
    "GET /kernels/{name}": {200: _json("KernelDocument")},
    "GET /packs": {200: _json("Packs")},
    "GET /packs/{pack_hash}": {
        200: {"application/octet-stream": _BINARY},
        206: {"application/octet-stream": _BINARY},
        304: None,
        416: None,
    },
    "GET /signing-key": {200: _json("SigningKey")},
    "GET /results": {200: _table("Results"), 406: None, 501: None},
    "GET /winners": {200: _table("Winners"), 406: None, 501: None},
    "GET /winners/history": {200: _json("History"), 404: None},
    "POST /winners/pin": {200: _json("Revision"), 404: None},
    "POST /winners/unpin": {200: _json("Revision"), 404: None, 409: None},
    "POST /winners/rollback": {200: _json("Revision"), 404: None, 409: None},
    "GET /devices": {200: _json("Devices")},
    "GET /keys": {200: _json("Keys")},
    "POST /keys": {201: _json("NewApiKey"), 409: None},
    "DELETE /keys/{name}": {200: _json("ApiKey")},
    "GET /audit": {200: _json("Audit")},
    "GET /healthz": {200: _json("Health")},
    "GET /readyz": {200: _json("Readiness"), 503: None},
    "GET /metrics": {200: {"text/plain": _TEXT}},
}  # fmt: skip
"""What each route answers, beside the refusals that `_refusals` adds."""

_MEANING: dict[int | str, str] = {
    200: "As asked",
    201: "Made",
    202: "Accepted",
    206: "The bytes that the Range header names",
    304: "Not modified: If-None-Match has the current ETag",
    400: "The body is not JSON",
    401: "No API key, or one that is unknown, revoked or expired",
    403: "The key lacks the scope, or the request is cross-site",
    404: "Not found; `detail` and `links` say what to do",
    406: "No media type of the Accept header is available",
    408: "The request did not arrive in time",
    409: "Conflict with the current state",
    413: "The body is too large",
    414: f"The URL has more than {MAX_URL_BYTES} bytes",
    416: "The Range begins after the last byte; Content-Range has the size",
    421: "If keys are not required, the service answers to loopback names only",
    422: "A field is invalid; `errors` names it and its valid values",
    429: "This client's limit is reached. Try again after Retry-After seconds",
    431: f"The URL and all headers together have more than {MAX_HEAD_BYTES} bytes",
    501: "pyarrow is not installed where the service runs",
    503: "Not ready, or the database cannot be used. Try again after Retry-After seconds",
    "5XX": "An internal error; the service's log has the cause",
}

_REFUSED = invalid_field("m", *integer_reason(0, 1, MAX_EXTENT)).document("/best")


def install(app: FastAPI) -> None:
    """Let `app.openapi()` give the whole description, made once."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`.

    Raises:
        KeyError: a route whose answers are not in the table.
    """
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    lookups = [route for route in app.routes if isinstance(route, LookupRoute)]
    first = {route.path: {route.method.lower(): _lookup(route)} for route in lookups}
    document["paths"] = first | document["paths"]
    questions = _questions(app.routes)
    schemas = _struct_schemas(ProblemBody, *questions.values())
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            name = f"{method.upper()} {path}"
            if name in questions:
                _add_question(operation, method, questions[name], schemas)
            answers = ANSWERS[name] | _refusals(method, path, operation)
            example = examples.answers().get(name)
            operation["responses"] = {
                str(status): _response(status, answers[status], example)
                for status in sorted(answers)
            }
            operation["responses"]["5XX"] = {"$ref": "#/components/responses/5XX"}
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = _given(parameter["schema"])
                example = examples.parameter(path, parameter["name"], parameter["in"])
                if example is not None:
                    parameter["example"] = example
            if name in examples.BODIES:
                body = operation["requestBody"]["content"]["application/json"]
                body["example"] = examples.BODIES[name]
    components = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    document["components"]["responses"] = {
        str(status): _refusal(status, meaning)
        for status, meaning in _MEANING.items()
        if status == "5XX" or int(status) >= 400
    }
    for name, question in questions.items():
        if name.startswith("GET"):
            schemas.pop(question.__name__)
    components = schemas | components | response_schemas.components()
    document["components"]["schemas"] = dict(sorted(components.items()))
    return document


def _questions(routes: Iterable[Any]) -> dict[str, type[msgspec.Struct]]:
    """The struct of each route that takes a query or a body, by method and path."""
    questions: dict[str, type[msgspec.Struct]] = {}
    for route in routes:
        if isinstance(route, LookupRoute):
            questions[f"{route.method} {route.path}"] = route.question
        elif isinstance(route, APIRoute):
            for dependency in route.dependant.dependencies:
                reader = getattr(dependency.call, "__self__", None)
                if isinstance(reader, QuestionReader) and route.include_in_schema:
                    questions[f"{min(route.methods or ())} {route.path}"] = reader.kind
        elif hasattr(route, "original_router"):  # newer FastAPI
            questions |= _questions(route.original_router.routes)
    return questions


def _lookup(route: LookupRoute) -> dict[str, Any]:
    """The operation of a route that FastAPI does not know, without its question."""
    headers = [_parameter("gemmsmith-runs", {"type": "string", "description": RUNS_DESCRIPTION})]
    if route.method == "GET":
        headers.insert(0, _parameter("if-none-match", {"type": "string"}))
    return {
        "tags": ["lookup"],
        "summary": route.name.replace("_", " ").title(),
        "description": route.description,
        "operationId": route.name,
        "security": [{BEARER.scheme_name: []}],
        "parameters": headers,
    }


def _add_question(
    operation: dict[str, Any], method: str, question: type[msgspec.Struct], schemas: dict[str, Any]
) -> None:
    """Describe the struct that a route takes: of a GET the query, of others the body."""
    name = question.__name__
    if method == "get":
        schema = schemas[name]
        operation["parameters"] = [
            _parameter(name, member, "query", required=name in schema["required"])
            for name, member in schema["properties"].items()
        ] + operation.get("parameters", [])
    else:
        operation["requestBody"] = {"required": True, "content": _json(name)}


def _parameter(
    name: str, schema: dict[str, Any], place: str = "header", *, required: bool = False
) -> dict[str, Any]:
    said: dict[str, Any] = {
        key: schema[key] for key in ("description", "deprecated") if key in schema
    }
    return {"name": name, "in": place, "required": required, "schema": schema, **said}


def _struct_schemas(*structs: type[msgspec.Struct]) -> dict[str, Any]:
    """The schemas of structs and of those they lead to, by name."""
    _, schemas = msgspec.json.schema_components(
        structs, ref_template=response_schemas.AT + "{name}"
    )
    for schema in schemas.values():
        if "enum" in schema:
            schema["type"] = "string"
        for name, member in schema.get("properties", {}).items():
            member["title"] = name.replace("_", " ").title()
    return schemas


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a parameter that is there: what may be left out is None here, null nowhere."""
    options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    if len(options) != 1:
        return schema
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    return {**rest, **options[0]}


def _refusals(method: str, path: str, operation: dict[str, Any]) -> Answers:
    """What follows from what a route takes."""
    statuses = {408, 414, 422, 431}
    if "security" in operation:
        statuses |= {401, 403, 421, 429, 503}
    if method != "get":
        statuses.add(413)
    if "requestBody" in operation:
        statuses.add(400)
    if "{" in path:
        statuses.add(404)
    return dict.fromkeys(statuses)


def _response(status: int, content: Content | None, example: Any) -> dict[str, Any]:
    if status >= 400:
        return {"$ref": f"#/components/responses/{status}"}
    answer: dict[str, Any] = {"description": _MEANING[status]}
    if content is not None:
        answer["content"] = content
        if example is not None:
            answer["content"] = {
                kind: {**said, "example": example} for kind, said in content.items()
            }
    return answer


def _refusal(status: int | str, meaning: str) -> dict[str, Any]:
    """A refusal as all routes share it."""
    refusal: dict[str, Any] = {"description": meaning, "content": _PROBLEM}
    if status == 422:
        refusal["content"] = {PROBLEM: {**_PROBLEM[PROBLEM], "example": _REFUSED}}
    if status in (429, 503):
        refusal["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 0}}}
    return refusal
