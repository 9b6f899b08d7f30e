"""What answers look like, as JSON Schemas for the OpenAPI description.

They come from the dataclasses that are encoded, and say in addition what `service.documents`
adds: links, times as text, pages. A test holds every answer of a running service against them, and
that they leave no member out.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, get_args

import msgspec

from gemmsmith.answers.answer import Answer
from gemmsmith.answers.history import Origin
from gemmsmith.answers.snapshot import Row
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.http.replies import SCHEMA
from service.tables import TRIALS, WINNERS, Table
from tuner.compile import Manifest
from tuner.explain import Explanation
from tuner.jobs import Job
from tuner.store.audit import AuditEntry
from tuner.store.keys import ApiKey
from tuner.trial import Trial, Winner

Schema = dict[str, Any]

_CORE = (
    *get_args(AnyKernel),
    Answer, ApiKey, AuditEntry, DeviceModel, Explanation, Job, Manifest, Origin, Row, Trial, Winner,
)  # fmt: skip
AT = "#/components/schemas/"
"""Where the description keeps them."""
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "integer"}
_MOMENT: Schema = {"type": "string", "format": "date-time"}
_MOMENT_OR_NONE: Schema = {"anyOf": [_MOMENT, {"type": "null"}]}
_CHECKS: Schema = {"type": "object", "additionalProperties": _TEXT}
_TYPES: dict[type, Schema] = {
    int: _NUMBER,
    float: {"type": "number"},
    str: _TEXT,
    bool: _FLAG,
    datetime: _MOMENT,
}


def ref(name: str) -> Schema:
    return {"$ref": AT + name}


def components() -> dict[str, Schema]:
    """Every shape by its name."""
    core: dict[str, Schema]
    _, core = msgspec.json.schema_components(_CORE, ref_template=AT + "{name}")
    for schema in core.values():
        if "properties" in schema:  # all members are always there
            schema["required"] = list(schema["properties"])
    core["Launch"]["required"].remove("algorithm")  # of cuBLASLt's launches only
    return core | _documents(core) | _pages()


def _documents(core: dict[str, Schema]) -> dict[str, Schema]:
    links = ref("Links")
    answer = _with(core["Answer"], links=links)
    answer["required"].remove("predicted_us")
    times = {f"{name}_at": _MOMENT_OR_NONE for name in ("started", "finished", "deadline")}
    job = _with(core["Job"], created_at=_MOMENT, **times, waits=_TEXT, links=links)
    job["required"].remove("waits")  # of one that waits, asked for alone
    held = {"pack": {"anyOf": [_TEXT, {"type": "null"}]}, "links": links}
    pack = _with(core["Manifest"], hash=_TEXT, links=links)
    for own in ("format", "taken"):
        del pack["properties"][own]
        pack["required"].remove(own)
    times = {f"{name}_at": _MOMENT_OR_NONE for name in ("expires", "last_used", "revoked")}
    key = _with(core["ApiKey"], created_at=_MOMENT, **times, links=links)
    link = _object(href=_TEXT, method=_TEXT, body={"type": "object"})
    return {
        "Answer": answer,
        "Job": job,
        "Trial": _with(core["Trial"], id=_NUMBER, created_at=_MOMENT),
        "Winner": _with(core["Winner"], links=links),
        "Explanation": _with(core["Explanation"], links=links),
        "Device": _with(core["DeviceModel"], slug=_TEXT, default=_FLAG, local=_FLAG, links=links),
        "KernelDocument": _any_of(
            _with(core[kind.__name__], **held) for kind in get_args(AnyKernel)
        ),
        "Manifest": pack,
        "ApiKey": key,
        "NewApiKey": _with(key, key=_TEXT),
        "AuditEntry": _with(core["AuditEntry"], at=_MOMENT),
        "Revision": _object(current=_FLAG, origin=ref("Origin"), answer=ref("Answer"), links=links),
        "Snapshot": _object(
            format=_NUMBER,
            device=_TEXT,
            revision=_TEXT,
            winners=_list_of(ref("Row")),
            signature=ref("Signature"),
        ),
        "SigningKey": _object(id=_TEXT, key=_TEXT),
        "Batch": _object(answers=_list_of(_any_of([ref("Answer"), ref("ProblemDetails")]))),
        "Devices": _object(devices=_list_of(ref("Device"))),
        "Event": _event(),
        "Health": _object(status=_TEXT),
        "Readiness": _object(status=_TEXT, schema=_TEXT, checks=_CHECKS),
        "TrialRow": _row(TRIALS),
        "WinnerRow": _row(WINNERS),
        "Links": {
            "description": "What to do next, by name.",
            "type": "object",
            "additionalProperties": ref("Link"),
        },
        "Link": {**link, "required": ["href"]},
        "ProblemDetails": _problem(links),
    }


def _problem(links: Schema) -> Schema:
    error = _object(field=_TEXT, message=_TEXT, accepted=_TEXT)
    error["required"].remove("accepted")
    problem = _object(
        type={"type": "string", "pattern": "^urn:gemmsmith:problem:"},
        title=_TEXT,
        status={"type": "integer", "minimum": 400, "maximum": 599},
        detail=_TEXT,
        instance=_TEXT,
        errors=_list_of(error),
        links=links,
        checks={**_CHECKS, "description": "The result of each check of /readyz."},
    )
    problem["required"] = ["type", "title", "status", "detail", "instance"]
    problem["description"] = "What is wrong and what to do, as defined by RFC 9457."
    return problem


def _event() -> Schema:
    """Of a stream: before version 3.2, OpenAPI describes one event in place of the stream."""
    data: Schema = {"type": "string", "contentMediaType": "application/json"}
    event = _object(id={"type": "string", "pattern": "^[0-9]+$"}, event=_TEXT, data=data)
    event["description"] = (
        "`event` is created, started, progress, trial, built, winner or requeued; or the last one: "
        "finished, failed or cancelled. A stream resumes after the `id` in Last-Event-ID."
    )
    return event


def _pages() -> dict[str, Schema]:
    lists = {
        "Jobs": ("jobs", ref("Job")),
        "Packs": ("packs", ref("Manifest")),
        "Keys": ("keys", ref("ApiKey")),
        "Audit": ("entries", ref("AuditEntry")),
        "History": ("revisions", ref("Revision")),
        "Results": ("trials", _any_of([ref("Trial"), ref("TrialRow")])),
        "Winners": ("winners", _any_of([ref("Winner"), ref("WinnerRow")])),
    }
    schema = {"type": "integer", "const": SCHEMA}
    return {
        name: _object(schema=schema, **{member: _list_of(items)}, links=ref("Links"))
        for name, (member, items) in lists.items()
    }


def _any_of(schemas: Iterable[Schema]) -> Schema:
    return {"anyOf": [*schemas]}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _with(schema: Schema, **properties: Schema) -> Schema:
    """The schema with further members, or others of the same names."""
    members = schema["properties"] | properties
    return {**schema, "properties": members, "required": list(members)}


def _row(table: Table[Any]) -> Schema:
    """A row of chosen columns."""
    members = {
        name: {"anyOf": [_TYPES[kind], {"type": "null"}]} for name, kind in table.columns.items()
    }
    return {"type": "object", "properties": members, "additionalProperties": False}
