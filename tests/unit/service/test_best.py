"""`/best` and `/best:batch`."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from gemmsmith.answers.answer import Answer
from gemmsmith.core.config import MAX_DISTANCE, Match, Use
from tests.support.serving import H100, H200
from tests.unit.service.conftest import CUBLAS_WINS, KNOWN
from tuner.backends import refusal

SIZES = {"m": 4096, "n": 4096, "k": 4096}


def ask(client: httpx.Client, device: str = H200.slug, **params: Any) -> httpx.Response:
    return client.get("/best", params={**SIZES, "device": device, **params})


def test_exact_answer_is_the_promoted_winner_whole(client: httpx.Client) -> None:
    reply = ask(client)
    assert reply.status_code == 200
    answer = msgspec.json.decode(reply.content, type=Answer)
    assert (answer.problem, answer.measured, answer.match) == (KNOWN, KNOWN, Match.EXACT)
    assert answer.distance == 0
    assert answer.revision == 1
    assert answer.use is Use.CUTLASS
    assert answer.statistics
    assert answer.statistics.median_us == 190.0
    assert answer.device == H200
    assert answer.environment is not None
    assert answer.environment.driver == "580.95"
    links = reply.json()["links"]
    assert client.get(links["self"]["href"]).json() == reply.json()
    assert client.get(links["kernel"]["href"]).json()["name"] == answer.config.kernel.name  # type: ignore[union-attr]


def test_devices_have_their_own_winners(client: httpx.Client) -> None:
    assert ask(client, device=H100.slug).json()["statistics"]["median_us"] == 250.0


def test_device_defaults_to_a_known_one(client: httpx.Client) -> None:
    default = next(d for d in client.get("/devices").json()["devices"] if d["default"])
    assert client.get("/best", params=SIZES).json()["device"]["name"] == default["name"]


def test_types_go_by_other_names_too(client: httpx.Client) -> None:
    asked = {**SIZES, "dtype": "bf16"}
    plain = client.get("/best", params=asked)
    other = client.get("/best", params=asked | {"dtype": "bfloat16"})
    assert plain.json()["match"] == "exact"
    assert (other.json(), other.headers["etag"]) == (plain.json(), plain.headers["etag"])
    refused = client.get("/best", params=asked | {"dtype": "float32"})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "dtype")
    body = {"problems": [{**SIZES, "dtype": "bfloat16"}]}
    assert client.post("/best:batch", json=body).json()["answers"][0]["match"] == "exact"


def test_nearest_names_what_was_measured(client: httpx.Client) -> None:
    answer = msgspec.convert(ask(client, m=8192).json(), Answer)
    assert answer.match is Match.NEAREST
    assert answer.measured == KNOWN
    assert answer.distance == pytest.approx(1.0)
    assert answer.problem.m == 8192
    assert ask(client, m=8192).json()["links"]["tune"]["body"]["m"] == 8192


def test_a_neighbour_with_an_illegal_kernel_is_no_answer(client: httpx.Client) -> None:
    answer = msgspec.convert(ask(client, k=4095).json(), Answer)  # TMA refuses rows of 8190 bytes
    assert answer.match is Match.PREDICTED


def test_what_nobody_tuned_is_predicted_and_no_reason_to_leave_cublas(
    client: httpx.Client,
) -> None:
    reply = ask(client, m=77, n=7000, k=640, dtype="fp16")
    assert reply.status_code == 200
    answer = msgspec.convert(reply.json(), Answer)
    assert (answer.match, answer.use, answer.device) == (Match.PREDICTED, Use.CUBLAS, H200)
    assert answer.config is not None
    assert refusal(answer.config.kernel, answer.problem) is None
    assert answer.predicted_us is not None
    assert 5 < answer.predicted_us < 100
    document = reply.json()
    for name in (
        *("measured", "distance", "statistics", "baseline", "speedup", "correctness"),
        *("conditions", "environment", "revision", "promoted_at"),
    ):
        assert document[name] is None, name
    assert document["links"].keys() == {"self", "tune"}  # the kernel has never been recorded
    tune = document["links"]["tune"]
    assert client.request(tune["method"], tune["href"], json=tune["body"]).status_code == 202


def test_predictions_are_revalidated_by_what_they_say(client: httpx.Client) -> None:
    first = ask(client, m=77, n=7000, k=640, dtype="fp16")
    tag = first.headers["etag"]
    assert client.get(first.request.url, headers={"If-None-Match": tag}).status_code == 304
    assert ask(client, m=78, n=7000, k=640, dtype="fp16").headers["etag"] != tag


def test_measured_answers_have_no_predicted_time(client: httpx.Client) -> None:
    assert "predicted_us" not in ask(client).json()
    assert "predicted_us" not in ask(client, m=8192).json()


def test_exact_refuses_predictions(client: httpx.Client) -> None:
    reply = ask(client, m=77, n=7000, k=640, dtype="fp16", exact="true")
    assert reply.status_code == 404
    assert reply.json()["type"].endswith(":not-tuned")


def test_where_no_kernel_is_legal_the_404_says_so(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Such problems have more than 2³¹ tiles: no GPU that there is has the memory to ask for one.
    monkeypatch.setattr("service.lookup.find.predict", lambda *_: None)
    reply = ask(client, m=79, n=7000, k=640, dtype="fp16")
    assert reply.status_code == 404
    assert reply.json()["type"].endswith(":not-tuned")
    assert "nor is any kernel legal" in reply.json()["detail"]


def test_a_cublas_neighbour_answers_without_an_illegal_config(client: httpx.Client) -> None:
    answer = msgspec.convert(ask(client, m=511, n=513, k=8191).json(), Answer)
    assert answer.measured == CUBLAS_WINS
    assert answer.use is Use.CUBLAS
    assert answer.config is None
    assert answer.statistics is None
    assert answer.baseline is not None


def test_distance_is_bounded(client: httpx.Client) -> None:
    assert MAX_DISTANCE == 2.0
    assert ask(client, m=16384).json()["match"] == "nearest"
    assert ask(client, m=16392).json()["match"] == "predicted"


def test_exact_refuses_neighbours_and_the_404_says_how_to_tune(client: httpx.Client) -> None:
    reply = ask(client, m=8192, exact="true")
    document = reply.json()
    assert reply.status_code == 404
    assert document["type"].endswith(":not-tuned")
    tune = document["links"]["tune"]
    ordered = client.request(tune["method"], tune["href"], json=tune["body"])
    assert ordered.status_code == 202
    assert ordered.json()["problem"]["m"] == 8192


def test_etag_saves_the_body(client: httpx.Client) -> None:
    first = ask(client)
    tag = first.headers["etag"]
    again = client.get(first.request.url, headers={"If-None-Match": f'"other", {tag}'})
    assert again.status_code == 304
    assert not again.content
    assert again.headers["etag"] == tag
    assert ask(client, m=8192).headers["etag"] != tag


@pytest.mark.parametrize(
    ("wrong", "field", "accepted"),
    [
        ({"m": 0}, "m", "1 … 2147483647"),
        ({"n": -5}, "n", "1 … 2147483647"),
        ({"k": 2**31}, "k", "1 … 2147483647"),
        ({"m": "12.0"}, "m", "an integer"),
        ({"m": "1e3"}, "m", "an integer"),
        ({"m": "９"}, "m", "an integer"),
        ({"m": "9" * 5000}, "m", "an integer"),
        ({"m": ""}, "m", "an integer"),
        ({"batch": 0}, "batch", "1 … 2147483647"),
        ({"dtype": "fp4"}, "dtype", "bf16"),
        ({"layout": "xx"}, "layout", "tn"),
        ({"arch": "sm70"}, "arch", "sm90"),
        ({"device": "voodoo-2"}, "device", H200.slug),
        ({"dytpe": "bf16"}, "dytpe", ""),
        ({"dtype": "fp8_e4m3", "layout": "nn"}, "layout", "tn"),
        ({"exact": "perhaps"}, "exact", ""),
        ({"m": 2**31 - 1, "n": 2**31 - 1}, "m", "GiB"),
        ({"batch": 2**31 - 1}, "batch", "GiB"),
    ],
)
def test_wrong_input_names_the_field_and_what_it_takes(
    client: httpx.Client, wrong: dict[str, Any], field: str, accepted: str
) -> None:
    reply = client.get("/best", params={**SIZES, "device": H200.slug, **wrong})
    assert reply.status_code == 422
    assert reply.headers["content-type"] == "application/problem+json"
    [error] = reply.json()["errors"]
    assert error["field"] == field
    assert accepted in error.get("accepted", "") + error["message"]
    assert field in reply.json()["detail"]


def test_all_wrong_fields_are_named_at_once(client: httpx.Client) -> None:
    errors = client.get("/best", params={"m": "x", "dtype": "y"}).json()["errors"]
    assert {error["field"] for error in errors} == {"m", "n", "k", "dtype"}


@pytest.mark.parametrize("count", [3, 40])
def test_batch_answers_in_order_and_a_wrong_problem_costs_itself_only(
    client: httpx.Client, count: int
) -> None:
    problems: list[Any] = [SIZES, {**SIZES, "m": 0}, {**SIZES, "m": 8192}]
    problems += [{**SIZES, "n": 2**20}] * (count - 3)  # predicted, by `GET /best` only
    reply = client.post("/best:batch", json={"problems": problems, "device": H200.slug})
    answers = reply.json()["answers"]
    assert reply.status_code == 200
    assert len(answers) == count
    assert answers[0] == ask(client).json()
    assert answers[1]["status"] == 422
    assert answers[1]["errors"][0]["field"] == "m"
    assert answers[1]["instance"] == "/best:batch#/problems/1"
    assert answers[2] == ask(client, m=8192).json()
    assert ask(client, n=2**20).json()["match"] == "predicted"
    again = client.post("/best:batch", json={"problems": problems, "device": H200.slug})
    for answer in (*answers[3:], *again.json()["answers"][3:]):
        assert (answer["status"], answer["type"].rpartition(":")[2]) == (404, "not-tuned")
        assert answer["links"]["tune"]["body"]["n"] == 2**20
    reply = client.post(
        "/best:batch", json={"problems": problems, "device": H200.slug, "exact": True}
    )
    answers = reply.json()["answers"]
    assert answers[0]["match"] == "exact"
    assert all(answer["type"].endswith(":not-tuned") for answer in answers[2:])


@pytest.mark.parametrize("item", [None, 7, "x", [], {}, {**SIZES, "m": 1.5}, {**SIZES, "m": "1"}])
def test_batch_survives_any_item(client: httpx.Client, item: Any) -> None:
    reply = client.post("/best:batch", json={"problems": [item]})
    assert reply.status_code == 200
    assert reply.json()["answers"][0]["status"] == 422


@pytest.mark.parametrize("body", [{}, {"problems": []}, {"problems": [{}] * 10_001}, {"x": 1}])
def test_batch_refuses_wrong_bodies(client: httpx.Client, body: Any) -> None:
    reply = client.post("/best:batch", json=body)
    assert reply.status_code == 422
    assert reply.json()["errors"][0]["field"] in ("problems", "x")
