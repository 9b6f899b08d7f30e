"""Lookups of operations that demand an order of sums: answered at every M by one order, or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemmsmith import Client, NotTuned, Problem, Use
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Match
from gemmsmith.core.launch import Launch
from service.settings import Settings
from tests.support import fake_nvcc
from tests.support.present import present
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, packs_of, promote, running, winner
from tuner.backends import kernels
from tuner.store import Store
from tuner.trial import Winner

WEIGHT = Problem(64, 4096, 4096, dtype="bf16.sum_sequential")
GRADIENT = Problem(4096, 4096, 512, dtype="bf16.out_f32.sum_sequential", layout="nt")
EXPERTS = Problem(512, 1536, 2048, batch=8, dtype="bf16.group_rows.sum_sequential")
TUNED = (WEIGHT, replace(WEIGHT, m=4096), GRADIENT, EXPERTS)
OF_EXPERTS = {"n": EXPERTS.n, "k": EXPERTS.k, "batch": EXPERTS.batch, "dtype": EXPERTS.dtype}
ASKED = {"m": 64, "n": 4096, "k": 4096, "dtype": WEIGHT.dtype}


def of_kernel(problem: Problem, place: int) -> Winner:
    kernel = [k for k in kernels(problem) if k.summation(Launch()) == "sequential"][place]
    return replace(winner(problem), candidate=Candidate(kernel=kernel, launch=Launch()))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = new_settings(tmp_path / "service")
    winners = [of_kernel(problem, place) for place, problem in enumerate(TUNED)]
    promote(settings, *winners)
    compiled = tmp_path / "unit.so"
    compiled.write_bytes(b"\x7fELF")
    held = [present(item.candidate).kernel for item in winners]
    pack = packs_of(settings).publish(compiled, held, fake_nvcc.toolchain(tmp_path / "toolchain"))
    with Store.open(settings.database) as store:
        store.add_pack(pack.hash, pack.toolchain, held, pack.path.stat().st_size)
    return settings


@pytest.mark.parametrize(
    ("change", "measured"),
    [
        ({}, TUNED[0]),
        ({"m": 1}, TUNED[0]),
        ({"m": 4095}, TUNED[0]),
        ({"m": 2**20}, TUNED[1]),
        ({"n": 4104}, TUNED[0]),  # another weight: the nearest
        ({"k": 4088}, TUNED[0]),
        ({"m": 3000, "k": 4088}, TUNED[1]),
        ({"n": 64, "k": 64}, TUNED[0]),
        ({"k": 4087}, None),  # no kernel reads such rows
        ({"batch": 2}, TUNED[0]),
        ({"dtype": "bf16.sum_split_2"}, None),
        ({"dtype": "fp16.sum_sequential"}, None),
        ({"dtype": "bf16.then_bias.sum_sequential"}, None),
        ({"m": 4096, "k": 7, "dtype": GRADIENT.dtype, "layout": "nt"}, TUNED[2]),
        ({"m": 4104, "dtype": GRADIENT.dtype, "layout": "nt"}, TUNED[2]),
        (OF_EXPERTS | {"m": 1}, TUNED[3]),
        (OF_EXPERTS | {"m": 100_000}, TUNED[3]),
        (OF_EXPERTS | {"batch": 4}, TUNED[3]),
        (OF_EXPERTS | {"n": 768}, TUNED[3]),
        (OF_EXPERTS | {"layout": "tt"}, None),
    ],
)
def test_a_weight_is_answered_at_every_number_of_tokens(
    settings: Settings, change: dict[str, Any], measured: Problem | None
) -> None:
    with running(settings) as client:
        reply = client.get("/best", params=ASKED | change)
        batch = client.post("/best:batch", json={"problems": [ASKED | change]})
        exact = client.get("/best", params=ASKED | change | {"exact": True})
    (in_batch,) = batch.raise_for_status().json()["answers"]
    if measured is None:
        assert (reply.status_code, exact.status_code, in_batch["status"]) == (404, 404, 404)
        assert "POST /tune" in reply.json()["detail"]
        assert "legal" not in reply.json()["detail"]
        assert (ASKED | change)["dtype"] in json.dumps(reply.json()["links"]["tune"])
        return
    answer = reply.raise_for_status().json()
    assert in_batch == answer
    assert answer["use"] == "cutlass"
    assert answer["match"] == ("nearest" if change else "exact")
    assert exact.status_code == (404 if change else 200)
    assert {name: answer["measured"][name] for name in ("m", "n", "k")} == {
        "m": measured.m, "n": measured.n, "k": measured.k,
    }  # fmt: skip
    assert answer["config"]["kernel"]["dtype"] == measured.operation.of_kernels.dtype


PLAIN = {"m": 37, "n": 4096, "k": 4096, "dtype": "bf16", "numerics": "invariant"}


def test_invariant_numerics_is_a_spelling_of_the_order(settings: Settings) -> None:
    """Of single and grouped products, in every form of the question."""
    parts = {"m": 9, "n": 1536, "k": 2048, "groups": 8, "grouping": "rows", "numerics": "invariant"}
    for plain, dtype in ((PLAIN, WEIGHT.dtype), (parts, EXPERTS.dtype)):
        rest = {name: plain[name] for name in plain if name not in ("numerics", "grouping")}
        named = rest | {"dtype": dtype}
        with running(settings) as client:
            answer = client.get("/best", params=plain).raise_for_status().json()
            assert answer == client.get("/best", params=named).raise_for_status().json()
            batch = client.post("/best:batch", json={"problems": [plain, named]}).json()
            assert batch["answers"] == [answer, answer]
            job = client.post("/tune", json=plain).raise_for_status().json()
            same = client.post("/tune", json=named).raise_for_status().json()
        assert answer["problem"]["dtype"] == job["problem"]["dtype"] == dtype
        assert answer["use"] == "cutlass"
        assert job["id"] == same["id"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": WEIGHT.dtype}, "names its order of sums already: leave out numerics"),
        ({"dtype": "bf16.sum_split_4"}, "names its order of sums already: leave out numerics"),
        ({"dtype": "int8"}, "same in every order: leave out numerics"),
        ({"dtype": "tf32"}, "does not exist for this operation"),
        ({"dtype": "fp8_e4m3"}, "does not exist for this operation"),
        ({"epilogue": "dgelu_bgrad"}, "without sums of rows"),
        ({"numerics": "bitwise"}, "invariant"),
        ({"numerics": ""}, "invariant"),
    ],
)
def test_a_wrong_question_of_numerics_names_the_field(
    settings: Settings, change: dict[str, str], says: str
) -> None:
    asked = PLAIN | change
    with running(settings) as client:
        replies = [client.get("/best", params=asked), client.post("/tune", json=asked)]
        batch = client.post("/best:batch", json={"problems": [asked]}).raise_for_status().json()
        assert client.get("/jobs").json()["jobs"] == []
    for reply in replies:
        assert reply.status_code == 422
        (error,) = reply.json()["errors"]
        assert error["field"] == "numerics"
        assert says in json.dumps(error)
    (in_batch,) = batch["answers"]
    assert in_batch["status"] == 422
    assert says in json.dumps(in_batch)


def test_a_client_asks_for_invariant_numerics(settings: Settings) -> None:
    with running(settings) as http, Client(str(http.base_url), cache_dir=None) as client:
        answer = client.best(37, 4096, 4096, numerics="invariant", device=H200.slug)
        assert answer == client.best(37, 4096, 4096, dtype=WEIGHT.dtype, device=H200.slug)
        assert answer.problem == replace(WEIGHT, m=37)
        job = client.tune(37, 4096, 4096, numerics="invariant")
        assert job.id == client.tune(37, 4096, 4096, dtype=WEIGHT.dtype).id
        with pytest.raises(NotTuned, match=r"dtype='fp16\.sum_sequential'"):
            client.best(64, 4096, 4096, dtype="fp16", numerics="invariant", device=H200.slug)


def test_plain_problems_have_their_own_answers(settings: Settings) -> None:
    with running(settings) as client:
        plain = client.get("/best", params=ASKED | {"dtype": "bf16"}).raise_for_status().json()
    assert plain["match"] == "predicted"


def test_clients_choose_as_the_service_does(settings: Settings, tmp_path: Path) -> None:
    with running(settings) as http, Client(str(http.base_url), cache_dir=None) as client:
        fetched = client.snapshot(H200.slug)
        for m in (1, 7, 63, 64, 65, 1000, 4095, 4096, 5000, 100_000):
            answer = client.best(m, 4096, 4096, dtype=WEIGHT.dtype, device=H200.slug)
            choice = present(fetched.find(replace(WEIGHT, m=m)))
            assert answer.use is Use.CUTLASS
            assert answer.match is (Match.EXACT if m in (64, 4096) else Match.NEAREST)
            assert (choice.config, choice.measured) == (answer.config, answer.measured)
            assert choice.deterministic
        other = client.best(64, 4096, 1024, dtype=WEIGHT.dtype, device=H200.slug)
        assert other.config == present(fetched.find(replace(WEIGHT, k=1024))).config
        with pytest.raises(NotTuned, match=r"dtype='fp16\.sum_sequential'"):
            client.best(64, 4096, 1024, dtype="fp16.sum_sequential", device=H200.slug)
    assert fetched.find(replace(WEIGHT, dtype="fp16.sum_sequential")) is None


def test_who_cannot_run_the_kernel_gets_no_cublas_in_its_place(settings: Settings) -> None:
    runs = {"Gemmsmith-Runs": "cublaslt cute"}
    old = {"User-Agent": "gemmsmith-client/0.1.0"}
    for headers in (runs, old):
        with running(settings) as client:
            reply = client.get("/best", params=ASKED, headers=headers)
            rows = client.get("/snapshot", headers=headers).raise_for_status().json()["winners"]
        assert reply.status_code == 404
        assert rows == []


def test_a_job_is_of_the_order(settings: Settings) -> None:
    with running(settings) as client:
        body = {"m": 1, "n": 64, "k": 64, "dtype": WEIGHT.dtype}
        job = client.post("/tune", json=body).raise_for_status().json()
        assert job["problem"]["dtype"] == WEIGHT.dtype
        wrong = client.post("/tune", json=body | {"dtype": "bf16.sum_promoted"})
        none = client.get("/best", params=ASKED | {"dtype": "int8.sum_sequential"})
    assert (wrong.status_code, none.status_code) == (422, 422)
    assert "for FP8 it does" in wrong.text
    assert "have an order of sums" in none.text
