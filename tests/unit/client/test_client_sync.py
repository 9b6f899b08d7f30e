"""The synchronous client against a real server that misbehaves."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import pytest

from gemmsmith import (
    Answer,
    Busy,
    Client,
    InvalidProblem,
    JobCancelled,
    JobFailed,
    NotTuned,
    NotUnderstood,
    PackCorrupt,
    Problem,
    Rejected,
    ServiceFault,
    ServiceUnavailable,
    TunedAnswer,
)
from gemmsmith.core.config import Use
from tests.support.replacing import replace
from tests.unit.client.misbehaving import (
    NOT_TUNED,
    SLOW_DOWN,
    UNAVAILABLE,
    Misbehaving,
    Say,
    job,
    stream,
)


def test_best_asks_and_understands(
    client: Client, server: Misbehaving, served: Say, answer
) -> None:
    server.say(served)
    assert client.best(256, 4096, 4096, exact=True, device="nvidia-h200-132sm") == answer
    (seen,) = server.seen
    assert seen.path == (
        "/best?m=256&n=4096&k=4096&batch=1&dtype=bf16&layout=tn&device=nvidia-h200-132sm&exact=true"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"m": 0}, "m must be in 1"),
        ({"n": -3}, "n must be in 1"),
        ({"k": 2**31}, "k must be in 1"),
        ({"m": 1.5}, "m must be an integer"),
        ({"m": True}, "m must be an integer"),
        ({"dtype": "int4"}, "bf16, fp16, fp8_e4m3, fp8_e5m2, int8, tf32"),
        ({"layout": "tx"}, "tn, tt, nt, nn"),
        ({"dtype": "fp8_e4m3", "layout": "nn"}, "needs layout tn"),
        ({"numerics": "bitwise"}, "numerics must be one of invariant"),
        ({"dtype": "int8", "numerics": "invariant"}, "leave out numerics"),
    ],
)
def test_wrong_problems_are_never_sent(client: Client, server, arguments, message) -> None:
    given: dict[str, Any] = {"m": 1, "n": 1, "k": 1} | arguments
    with pytest.raises(InvalidProblem, match=message):
        client.best(**given)
    with pytest.raises(InvalidProblem, match=message):
        client.tune(**given)
    assert server.seen == []


def test_an_unchanged_answer_is_not_sent_again(client, server, served, answer) -> None:
    server.say(served, Say(304))
    assert client.best(256, 4096, 4096) == answer
    assert client.best(256, 4096, 4096) == answer
    assert "if-none-match" not in server.seen[0].headers
    assert server.seen[1].headers["if-none-match"] == 'W/"one"'
    assert not client.last_from_cache


def test_an_answer_from_before_cublas_kernels_were_named_is_read(
    client: Client, server: Misbehaving, answer
) -> None:
    body = msgspec.to_builtins(answer)
    del body["baseline_kernels"]
    server.say(Say(body=msgspec.json.encode(body)))
    assert client.best(256, 4096, 4096) == answer
    assert answer.baseline_kernels == ()


def test_retries_until_it_works(client, server, served, answer) -> None:
    server.say(UNAVAILABLE, Say(502, b"<html>"), served)
    assert client.best(256, 4096, 4096) == answer
    assert len(server.seen) == 3


def test_gives_up_with_the_services_own_words(client: Client, server: Misbehaving) -> None:
    server.say(UNAVAILABLE)
    with pytest.raises(Busy, match="later"):
        client.best(1, 1, 1)
    assert len(server.seen) == 3


def test_a_long_retry_after_is_the_callers_to_decide(client: Client, server: Misbehaving) -> None:
    server.say(SLOW_DOWN)
    with pytest.raises(Busy) as caught:
        client.best(1, 1, 1)
    assert caught.value.retry_after == 1000
    assert len(server.seen) == 1


def test_not_tuned_is_typed_and_not_retried(client: Client, server, served) -> None:
    server.say(served, NOT_TUNED)
    client.best(256, 4096, 4096)
    with pytest.raises(NotTuned) as caught:
        client.best(256, 4096, 4096)
    assert caught.value.document["status"] == 404
    server.stop()
    with pytest.raises(
        ServiceUnavailable
    ):  # an answer that the service has withdrawn is not served from the cache
        client.best(256, 4096, 4096)


def test_a_404_of_another_server_is_not_not_tuned(client: Client, server: Misbehaving) -> None:
    server.say(Say(404, b"<h1>nginx</h1>"))
    with pytest.raises(Rejected, match="no problem document"):
        client.best(1, 1, 1)


@pytest.mark.parametrize(
    "body", [b"<html>hello</html>", b"", b"[]", b'{"problem": 1}', b'{"status": "ok"}', b"\xff\xfe"]
)
def test_garbage_is_a_service_fault(client: Client, server: Misbehaving, body: bytes) -> None:
    server.say(Say(200, body))
    with pytest.raises(ServiceFault, match="gemmsmith service"):
        client.best(1, 1, 1)
    with pytest.raises(ServiceFault):
        client.devices()
    with pytest.raises(ServiceFault):
        client.job_status("x")
    with pytest.raises(ServiceFault):
        list(client.results())


@pytest.mark.parametrize("change", ["use", "backend", "launch", "problem"])
def test_an_answer_not_known_to_this_version_is_no_answer(
    client: Client, server: Misbehaving, served: Say, answer: Answer, change: str
) -> None:
    odd = json.loads(served.body)
    match change:
        case "use":
            odd["use"] = "triton"
        case "backend":
            odd["config"]["kernel"]["backend"] = "triton"
        case "launch":
            odd["config"]["launch"]["dynamic"] = True
        case "problem":
            odd["measured"]["epilogue"] = "relu"
    server.say(served, Say(200, json.dumps(odd).encode()))
    assert client.best(256, 4096, 4096) == answer
    with pytest.raises(NotUnderstood, match="upgrade"):
        client.best(256, 4096, 4096)
    assert not client.last_from_cache
    both = {"answers": [odd, json.loads(served.body)]}
    server.say(Say(200, json.dumps(both).encode()))
    answers = client.best_many([answer.problem] * 2)
    assert isinstance(answers[0], NotUnderstood)
    assert answers[1] == answer


def test_jobs_and_devices_not_known_to_this_version_are_left_out(
    client: Client, server: Misbehaving, answer: Answer
) -> None:
    job = {"id": "a", "state": "done", "problem": {"m": 1, "n": 2, "k": 3}}
    odd = [job | {"state": "asleep"}, job | {"problem": {"m": 1, "n": 2, "k": 3, "dtype": "bf17"}}]
    server.say(Say(200, json.dumps({"jobs": [*odd, job]}).encode()))
    assert [status.problem for status in client.jobs()] == [Problem(m=1, n=2, k=3)]
    known = msgspec.to_builtins(answer.device) | {"slug": answer.device.slug, "default": True}
    server.say(Say(200, json.dumps({"devices": [{"slug": "tpu"}, known]}).encode()))
    assert client.devices() == [answer.device]


def test_every_request_says_which_backends_can_be_run(
    client: Client, server: Misbehaving, served: Say
) -> None:
    server.say(served)
    client.best(256, 4096, 4096)
    assert server.seen[0].headers["gemmsmith-runs"] == "cutlass3x cutlass2x cute cublaslt plugin"


def test_the_last_known_answer_when_the_service_is_away(
    client: Client, server: Misbehaving, served: Say, answer: Answer, caplog
) -> None:
    server.say(served)
    client.best(256, 4096, 4096)
    server.stop()
    with caplog.at_level(logging.WARNING, "gemmsmith"):
        for _ in range(3):
            assert client.best(256, 4096, 4096) == answer
            assert client.last_from_cache
    assert len(caplog.records) == 1, "one warning an outage, not one a lookup"
    with pytest.raises(ServiceUnavailable, match="gemmsmith serve"):
        client.best(1, 1, 1)


def test_once_away_cached_answers_cost_no_time_outs(client, server, served) -> None:
    server.say(served)
    client.best(256, 4096, 4096)
    server.say(Say(500, b"{}"))
    before = len(server.seen)
    for _ in range(5):
        client.best(256, 4096, 4096)
    assert len(server.seen) == before + 1


def test_a_dropped_answer_is_asked_for_again(client, server, served, answer) -> None:
    server.say(Say(200, served.body[:100], drop=True), served)
    assert client.best(256, 4096, 4096) == answer


def test_best_many_keeps_the_order_and_returns_not_tuned(
    client: Client, server: Misbehaving, served: Say, answer: Answer
) -> None:
    both = [json.loads(served.body), json.loads(NOT_TUNED.body)]
    server.say(Say(200, json.dumps({"answers": both}).encode()))
    other = Problem(m=3, n=3, k=3)
    answers = client.best_many([answer.problem, other], exact=True)
    assert answers[0] == answer
    assert isinstance(answers[1], NotTuned)
    body = json.loads(server.seen[0].body)
    assert body["exact"] is True
    assert body["problems"][1] == {
        "m": 3, "n": 3, "k": 3, "batch": 1, "dtype": "bf16", "layout": "tn",
    }  # fmt: skip
    server.stop()
    assert client.best_many([answer.problem], exact=True) == [answer]
    with pytest.raises(ServiceUnavailable, match="1 of 2 problems are not cached"):
        client.best_many([answer.problem, other], exact=True)
    assert client.best_many([]) == []


def test_best_many_is_split_and_every_piece_checked(client: Client, server: Misbehaving) -> None:
    piece = [json.loads(NOT_TUNED.body)]
    server.say(
        Say(200, json.dumps({"answers": piece * 256}).encode()),
        Say(200, json.dumps({"answers": piece * 3}).encode()),
    )
    problems = [Problem(m=i + 1, n=1, k=1) for i in range(260)]
    with pytest.raises(ServiceFault, match="3 answers to 4"):
        client.best_many(problems)
    assert len(server.seen) == 2


def test_tune_is_repeated_with_one_key(client: Client, server: Misbehaving) -> None:
    server.say(UNAVAILABLE, job("waiting"))
    handle = client.tune(256, 4096, 4096, effort="quick", priority=3)
    assert handle.id == "j1"
    keys = {seen.headers["idempotency-key"] for seen in server.seen}
    assert len(server.seen) == 2
    assert len(keys) == 1
    assert json.loads(server.seen[0].body)["effort"] == "quick"
    client.tune(256, 4096, 4096)
    assert server.seen[-1].headers["idempotency-key"] not in keys
    with pytest.raises(InvalidProblem, match="quick, default, exhaustive"):
        client.tune(1, 1, 1, effort="maximal")


def test_tune_says_how_often_a_problem_is_run(client: Client, server: Misbehaving) -> None:
    server.say(job("waiting", calls=106, expected_saving_us=53.0), job("waiting"))
    status = client.tune(256, 4096, 4096, calls=96).status
    assert json.loads(server.seen[0].body)["calls"] == 96
    assert (status.calls, status.expected_saving_us) == (106, 53.0)
    status = client.tune(256, 4096, 4096).status
    assert "calls" not in json.loads(server.seen[1].body), "an older service knows no calls"
    assert (status.calls, status.expected_saving_us) == (0, None)
    for wrong in (-1, 10**15 + 1, 1.0, True, "96", None):
        with pytest.raises(InvalidProblem, match="calls must be an integer in 0 … 1000000000000"):
            client.tune(256, 4096, 4096, calls=wrong)
    assert len(server.seen) == 2


def test_wait_resumes_after_a_dropped_stream(client, server, served, answer) -> None:
    progress = {"phase": "screen", "done": 5, "total": 9, "best_us": 15.7, "best": "k"}
    server.say(
        job("waiting"),
        stream((1, "created", {}), (2, "progress", progress), drop=True),
        UNAVAILABLE,
        stream((3, "winner", {}), (4, "finished", {})),
        job("done", winner_revision=1),
        served,
    )
    updates = []
    handle = client.tune(256, 4096, 4096)
    assert handle.wait(timeout=30, on_progress=updates.append) == TunedAnswer.of(answer, answer)
    assert [u.done for u in updates] == [0, 5, 5, 5]
    assert updates[1].phase == "screen"
    assert "last-event-id" not in server.seen[1].headers
    assert server.seen[2].headers["last-event-id"] == "2"
    assert server.seen[3].headers["last-event-id"] == "2"
    assert handle.status.winner_revision == 1
    assert "exact=true" in server.seen[-1].path


@pytest.mark.parametrize(("state", "error"), [("failed", JobFailed), ("cancelled", JobCancelled)])
def test_wait_tells_how_it_ended(client, server, state, error) -> None:
    server.say(job("waiting"), stream((1, state, {})), job(state, error="nvcc went away"))
    handle = client.tune(256, 4096, 4096)
    with pytest.raises(error, match="nvcc went away" if state == "failed" else "cancelled"):
        handle.wait()


def test_wait_ends_when_the_stream_ends_with_the_job(client, server, served, answer) -> None:
    server.say(job("done"), stream(), job("done"), job("done"), served)
    assert client.job("j1").wait() == TunedAnswer.of(answer, answer)


def test_wait_returns_the_jobs_winner_and_what_is_served(client, server, served, answer) -> None:
    own = replace(answer, revision=7, replayed=True, use=Use.CUBLAS)
    rows = [{"answer": msgspec.to_builtins(own), "origin": "replayed", "current": False}]
    history = Say(body=msgspec.json.encode({"schema": 1, "revisions": rows}))
    done = job("done", winner_revision=7)
    server.say(done, stream((1, "finished", {})), done, served, history)
    tuned = client.job("j1").wait()
    assert tuned == TunedAnswer.of(own, answer)
    assert (tuned.revision, tuned.served) == (7, answer)
    assert not tuned.is_served
    query = dict(parse_qsl(urlsplit(server.seen[-1].path).query))
    assert (query["after"], query["limit"], query["device"]) == ("8", "1", answer.device.slug)
    assert repr(tuned) == (
        "<Answer 256×4096×4096 bf16 tn: exact, cublas, 18.6 µs (461.8 TFLOP/s), recorded H200; "
        f"served instead: {answer!r}>"
    )
    assert "served instead" in tuned._repr_html_()


def test_wait_never_takes_another_revision_for_the_jobs(client, server, served, answer) -> None:
    rows = [{"answer": msgspec.to_builtins(answer), "origin": "measured", "current": True}]
    history = Say(body=msgspec.json.encode({"schema": 1, "revisions": rows}))
    done = job("done", winner_revision=7)
    server.say(done, stream((1, "finished", {})), done, served, history)
    with pytest.raises(NotUnderstood, match="revision 7, the winner of job j1, needs a newer"):
        client.job("j1").wait()


def test_wait_times_out_and_the_job_goes_on(client: Client, server: Misbehaving) -> None:
    server.say(job("waiting"), stream((1, "created", {}), drop=True))
    handle = client.tune(256, 4096, 4096)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="it goes on"):
        handle.wait(timeout=0.3)
    assert time.monotonic() - began < 3


def test_events_give_up_when_the_service_stays_away(client: Client, server: Misbehaving) -> None:
    server.say(stream((1, "created", {}), drop=True))
    events = client.job_events("j1")
    first = next(event for event in events if event is not None)
    assert (first.id, first.kind) == ("1", "created")
    server.stop()
    with pytest.raises(ServiceUnavailable, match="The job goes on"):
        list(events)


def test_unknown_job_is_rejected(client: Client, server: Misbehaving) -> None:
    server.say(Say(404, b'{"title": "Job not found", "detail": "no job j9", "status": 404}'))
    with pytest.raises(Rejected, match="no job j9"):
        list(client.job_events("j9"))
    with pytest.raises(Rejected):
        client.cancel("j9")


def test_results_follow_the_pages(client: Client, server: Misbehaving) -> None:
    def page(ids: list[int], following: str | None) -> Say:
        links = {"next": {"href": following}} if following else {}
        rows = [{"id": i} for i in ids]
        return Say(200, json.dumps({"trials": rows, "links": links}).encode())

    server.say(page([1, 2], "/results?dtype=bf16&after=2&limit=200"), page([3], None))
    assert [row["id"] for row in client.results(dtype="bf16")] == [1, 2, 3]
    assert server.seen[1].path == "/results?dtype=bf16&after=2&limit=200"
    server.say(page([1, 2], "/results?after=2"))
    assert [row["id"] for row in client.results(limit=1)] == [1]
    assert len(server.seen) == 3


PACK = hashlib.sha256(b"ELF").hexdigest()


def test_packs_are_downloaded_once(client: Client, server: Misbehaving) -> None:
    server.say(Say(200, b"ELF"))
    path = client.pack(PACK)
    assert client.pack(PACK) == path
    assert len(server.seen) == 1
    path.write_bytes(b"EL")
    assert client.pack(PACK).read_bytes() == b"ELF"
    assert len(server.seen) == 2
    with pytest.raises(PackCorrupt):
        client.pack("1" * 64)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        client.pack("../answers")


def test_without_a_cache_nothing_is_kept(server: Misbehaving, served: Say, answer) -> None:
    server.say(served)
    with Client(server.url, cache_dir=None, retries=0) as client:
        assert client.best(256, 4096, 4096) == answer
        server.say(Say(200, b"ELF"))
        path = client.pack(PACK)
        assert path.exists()
        server.stop()
        with pytest.raises(ServiceUnavailable):
            client.best(256, 4096, 4096)
    assert not path.exists()


def test_wrong_numbers_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="timeout"):
        Client(timeout=0)
    with pytest.raises(ValueError, match="retries"):
        Client(retries=-1)
