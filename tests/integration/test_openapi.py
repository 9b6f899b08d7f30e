"""The OpenAPI description: what it was, that it is complete, and that answers are as it says."""

from __future__ import annotations

import copy
import difflib
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
from fastapi.routing import APIRoute

from gemmsmith.core.problem import Problem
from service.http import examples
from service.http.app import create_app
from service.settings import Settings
from tests.support.openapi import REFRESH, SNAPSHOT, described, routes, text
from tests.support.serving import H200, filled, running, trial

KNOWN = Problem(m=4096, n=4096, k=4096)
DOCUMENT = described()


def responses(operation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    shared = DOCUMENT["components"]["responses"]
    return {
        status: shared[response["$ref"].split("/")[-1]] if "$ref" in response else response
        for status, response in operation["responses"].items()
    }


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def validator(schema: dict[str, Any], *, strict: bool = False) -> jsonschema_rs.Validator:
    """Of a schema of the document; a strict one refuses members that are not described."""
    components = copy.deepcopy(DOCUMENT["components"])
    if strict:
        _close(components)
    return jsonschema_rs.validator_for({**schema, "components": components})


def _close(node: Any) -> None:
    if isinstance(node, dict):
        if "properties" in node:
            node.setdefault("additionalProperties", False)
        for child in node.values():
            _close(child)
    elif isinstance(node, list):
        for child in node:
            _close(child)


def test_the_description_is_what_it_was() -> None:
    """Not a check that it is right: it makes every change of the contract one that is looked at."""
    before, now = SNAPSHOT.read_text(encoding="utf-8"), text(DOCUMENT)
    difference = "\n".join(
        difflib.unified_diff(before.splitlines(), now.splitlines(), "before", "now", lineterm="")
    )
    assert not difference, f"the contract has changed; if that is meant: {REFRESH}\n{difference}"


def test_every_answer_of_every_route_has_a_shape() -> None:
    names = []
    for method, path, operation in operations():
        names.append(operation["operationId"])
        assert operation["description"], path
        answers = responses(operation)
        assert any(status.startswith("2") for status in answers), path
        for status, answer in answers.items():
            assert answer["description"]
            content = answer.get("content", {})
            assert bool(content) == (status != "304"), (method, path, status)
            if status[0] in "45":
                assert list(content) == ["application/problem+json"], (method, path, status)
            for kind in content.values():
                validator(kind["schema"])  # a schema, and its references lead somewhere
    assert len(names) == len(set(names))


def test_no_route_is_left_out() -> None:
    """What is not described is a page, or leads to the description."""
    described = {(method.upper(), path) for method, path, _ in operations()}
    left_out = {
        path
        for method, path, _ in routes(create_app(Settings.load({})).routes)
        if (method, path) not in described
    }
    assert {path for path in left_out if not re.match("/ui(/|$)", path)} == {
        "/",
        "/docs",
        "/openapi.json",
    }


def test_the_framework_checks_no_value() -> None:
    """Its errors are no problem documents: what can be wrong is a struct's."""
    for _, path, route in routes(create_app(Settings.load({})).routes):
        if isinstance(route, APIRoute):
            for part in [route.dependant, *route.dependant.dependencies]:
                parameters = [*part.path_params, *part.query_params, *part.header_params]
                for field in [*parameters, *part.cookie_params, *part.body_params]:
                    assert field.field_info.annotation in (str, str | None), (path, field.name)


def test_examples_are_what_they_are_examples_of() -> None:
    seen = 0
    for _, path, operation in operations():
        places = [*operation.get("parameters", ())]
        places += operation.get("requestBody", {}).get("content", {}).values()
        for answer in responses(operation).values():
            places += answer.get("content", {}).values()
        for place in places:
            if "example" in place:
                validator(place["schema"], strict=True).validate(place["example"])
                seen += 1
        if "requestBody" in operation:
            assert "example" in operation["requestBody"]["content"]["application/json"], path
    assert seen > 50


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = filled(tmp_path_factory.mktemp("openapi"), KNOWN)
    with running(settings) as client:
        yield client


@pytest.mark.parametrize("path", examples.FILTERS)
def test_the_example_of_a_listing_is_answered(client: httpx.Client, path: str) -> None:
    parameters = DOCUMENT["paths"][path]["get"]["parameters"]
    command = examples.curl("get", path, parameters, str(client.base_url).rstrip("/"))
    asked = shlex.split(command)[-1]
    assert "?" in asked
    assert client.get(asked).status_code == 200


def test_answers_are_described_to_the_last_member(client: httpx.Client) -> None:
    """Every route, in an order in which each finds something to answer with."""
    asked = {"m": 4096, "n": 4096, "k": 4096}
    job = client.post("/tune", json=asked).json()["id"]
    pack = client.get("/packs").json()["packs"][0]["hash"]
    kernel = trial(KNOWN).candidate.kernel.name
    asking = "m=4096&n=4096&k=4096"
    calls: list[tuple[str, str, str, dict[str, Any] | None]] = [
        ("GET", "/best", f"/best?{asking}", None),
        ("GET", "/best", "/best?m=77&n=7000&k=640&dtype=fp16", None),
        ("POST", "/best:batch", "/best:batch", {"problems": [asked, {"m": 0, "n": 1, "k": 1}]}),
        ("GET", "/explain", f"/explain?{asking}", None),
        ("GET", "/explain", "/explain?m=7&n=7&k=7", None),
        ("GET", "/snapshot", "/snapshot", None),
        ("POST", "/tune", "/tune", asked),
        ("POST", "/tune", "/tune", {**asked, "m": 1, "calls": 5, "device": H200.slug}),
        ("POST", "/tune", "/tune", {**asked, "colour": "red"}),
        ("GET", "/jobs", "/jobs", None),
        ("GET", "/jobs/{job_id}", f"/jobs/{job}", None),
        ("POST", "/jobs/{job_id}/retry", f"/jobs/{job}/retry", None),
        ("DELETE", "/jobs/{job_id}", f"/jobs/{job}", None),
        ("POST", "/jobs/{job_id}/retry", f"/jobs/{job}/retry", None),
        ("GET", "/jobs/{job_id}/events", f"/jobs/{job}/events", None),
        ("GET", "/kernels/{name}", f"/kernels/{kernel}", None),
        ("GET", "/packs", "/packs", None),
        ("GET", "/packs/{pack_hash}", f"/packs/{pack}", None),
        ("GET", "/results", "/results", None),
        ("GET", "/results", "/results?fields=m,median_us", None),
        ("GET", "/results", "/results?format=csv", None),
        ("GET", "/winners", "/winners", None),
        ("GET", "/winners", "/winners?fields=m,speedup", None),
        ("GET", "/winners", "/winners?format=parquet", None),
        ("POST", "/winners/pin", "/winners/pin", {**asked, "revision": 1}),
        ("POST", "/winners/unpin", "/winners/unpin", asked),
        ("POST", "/winners/rollback", "/winners/rollback", asked),
        ("GET", "/winners/history", f"/winners/history?{asking}", None),
        ("GET", "/devices", "/devices", None),
        ("POST", "/keys", "/keys", {"name": "one", "scope": "tune"}),
        ("POST", "/keys", "/keys", {"name": "one", "scope": "tune"}),
        ("GET", "/keys", "/keys", None),
        ("DELETE", "/keys/{name}", "/keys/one", None),
        ("GET", "/audit", "/audit", None),
        ("GET", "/signing-key", "/signing-key", None),
        ("GET", "/healthz", "/healthz", None),
        ("GET", "/readyz", "/readyz", None),
        ("GET", "/metrics", "/metrics", None),
    ]  # fmt: skip
    for method, path, url, body in calls:
        reply = client.request(method, url, json=body)
        check(method, path, reply)
    answered = {(method.lower(), path) for method, path, _, _ in calls}
    assert answered == {(method, path) for method, path, _ in operations()}


def check(method: str, path: str, reply: httpx.Response) -> None:
    answers = responses(DOCUMENT["paths"][path][method.lower()])
    where = f"{method} {path}: {reply.status_code} {reply.text[:300]}"
    assert str(reply.status_code) in answers, where
    kind = reply.headers["content-type"].split(";")[0]
    content = answers[str(reply.status_code)]["content"]
    assert kind in content, where
    if kind.endswith("json"):
        try:
            validator(content[kind]["schema"], strict=True).validate(json.loads(reply.content))
        except jsonschema_rs.ValidationError as error:
            pytest.fail(f"{where}\n{error}")
