"""Whatever we print as a problem, an operation or a device is accepted where one is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import pytest
import typer

from gemmsmith.core.device import DeviceModel, called
from gemmsmith.core.operation import DType, Operation, of_dtype
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.http import requests
from service.cli.main import app
from service.cli.options import problem_of, typed
from service.cli.session import model_of
from service.documents import best_url
from service.http.questions import QuestionReader
from service.http.requests import BestQuery, TuneBody
from service.lookup.devices import Catalogue
from service.pages import addresses, operations
from service.pages.search import SearchError, parse
from service.pages.tune import OFFERED
from service.settings import Settings
from tests.support.present import present
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, promote, running, winner
from tuner import places, suites
from tuner.devices import open_device
from tuner.exchange import read_winners
from tuner.models import by_model, of_suites, products
from tuner.store import Store
from tuner.store.listing import Search
from tuner.trial import Winner

COMMANDS = ("best", "explain", "tune", "enumerate", "compile", "demo", "winners history", "results")


@cache
def winners() -> list[Winner]:
    files = sorted(places.shipped("configs/winners").glob("*.jsonl"))
    return [winner for path in files for winner in read_winners(path)]


@cache
def problems() -> list[Problem]:
    """Of all shipped winners and suites, each once."""
    found = {winner.problem for winner in winners()}
    for path in suites.shipped().glob("*.toml"):
        suite = suites.load(path)
        for dtype in (*DType, *suite.dtypes):
            with suppress(InvalidProblem):
                found |= {problem for _, problem in suite.problems(dtype)}
    return sorted(found)


@cache
def samples() -> list[Problem]:
    """One of each operation, with groups and without."""
    return list({(p.dtype, p.layout, p.batch > 1): p for p in problems()}.values())


@cache
def known() -> list[Operation]:
    return list({p.operation.key: p.operation for p in problems()}.values())


@cache
def models() -> dict[str, DeviceModel]:
    return {winner.device.slug: winner.device for winner in winners()}


def texts(problem: Problem) -> Iterator[str]:
    """The problem as commands, pages and messages print it, and as people type that."""
    yield str(problem)
    yield str(problem).replace("×", "x")
    yield str(problem).replace("×", "*").upper()
    yield f"{str(problem).partition(' ')[0]} {problem.operation.key}"


def test_there_is_something_to_test() -> None:
    assert len(problems()) > 1000
    assert len(samples()) > 60
    assert len(models()) == 2


def test_python_reads_every_problem() -> None:
    for problem in problems():
        for text in texts(problem):
            assert Problem.parse(text) == problem
        assert eval(f"Problem({problem.arguments})") == problem
        assert Operation.read(str(problem.operation)) == problem.operation
        assert Operation.read(problem.operation.key) == problem.operation
        fields = requests.fields_of(problem)
        loud = {"dtype": fields["dtype"].upper(), "layout": fields["layout"].upper()}
        assert requests.problem_of(**fields | loud) == problem


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_read_every_problem(name: str) -> None:
    command = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]  # type: ignore[attr-defined]
    before = ["--problem"] if name == "results" else []

    def read(words: list[str]) -> Problem:
        given = command.make_context(name, [*before, *words]).params
        sizes = given["problem"] if name == "results" else [given[size] for size in "mnk"]
        dtype = given["dtype"] or "bf16"
        (dtype,) = [dtype] if isinstance(dtype, str) else dtype
        return problem_of(*sizes, batch=given["batch"], dtype=dtype, layout=given["layout"])

    for problem in samples():
        for text in texts(problem):
            if "*" not in text:  # a sign of shells
                assert read([text]) == problem
            assert read(text.split()) == problem
        assert read(typed(problem).split()) == problem


def test_an_option_may_not_contradict_the_problem() -> None:
    best = typer.main.get_command(app).commands["best"]  # type: ignore[attr-defined]
    best.make_context("best", ["8x8x8 bf16 nt", "--dtype", "bf16"])
    with pytest.raises(Exception, match="the problem says --layout nt, but --layout is tt"):
        best.make_context("best", ["--layout", "tt", "8x8x8 bf16 nt"])
    with pytest.raises(InvalidProblem, match=r"the layout of bf16\.nt is nt, but --layout is tt"):
        problem_of(8, 8, 8, batch=1, dtype="bf16.nt", layout="tt")


def test_addresses_and_queries_read_every_problem() -> None:
    for problem in problems():
        *_, dtype, layout, sizes = unquote(addresses.problem(problem, "h200")).split("/")
        assert addresses.problem_of(dtype, layout, sizes) == problem
        assert (
            QuestionReader(BestQuery).query(urlsplit(best_url(problem)).query.encode()).problem()
            == problem
        )
    for problem in samples():
        query = dict(parse_qsl(urlsplit(best_url(problem)).query))
        loud = query | {"dtype": problem.dtype.upper(), "layout": problem.layout.upper()}
        assert QuestionReader(BestQuery).query(urlencode(loud).encode()).problem() == problem
        body = requests.fields_of(problem) | {"layout": problem.layout.upper()}
        assert QuestionReader(TuneBody).document(body).problem() == problem


def meets(search: Search, problem: Problem) -> bool:
    sizes = (problem.m, problem.n, problem.k)
    return (
        all(getattr(search, n) in (None, getattr(problem, n)) for n in ("m", "n", "k", "batch"))
        and search.dtype in (None, problem.dtype)
        and search.layout in (None, problem.layout)
        and (search.operations is None or problem.operation.key in search.operations)
        and all(size in sizes for size in search.extents)
    )


def test_the_pages_search_reads_every_problem() -> None:
    for problem in problems():
        search = parse(str(problem), known())
        assert (search.dtype, search.layout) == (problem.dtype, problem.layout)
        assert (search.m, search.n, search.k) == (problem.m, problem.n, problem.k)
        assert search.batch in (None, problem.batch)
        assert (search.batch is None) == (str(problem).count("×") == 2)
    for problem in samples():
        for text in texts(problem):
            if "*" not in text:  # any size
                assert parse(text, known()) == parse(str(problem), known())
        further = operations.suffix(problem.operation)
        for text in (further, problem.dtype, problem.operation.key, f"{further} {problem.layout}"):
            assert meets(parse(text, known()), problem), text


def test_a_search_for_what_follows_the_types_finds_nothing_else() -> None:
    found = parse("group_rows", known()).operations
    assert found
    assert all(operations.suffix(Operation.parse(key)) == "group_rows" for key in found)
    assert parse("fp16 group_rows", known()).dtype == "fp16.group_rows"
    plain = parse("bf16 plain", known()).operations
    assert plain == tuple(op.key for op in known() if op.dtype == "bf16")
    with pytest.raises(SearchError, match=r"cannot be read: 'group_row'; did you mean group_rows"):
        parse("group_row", known())


def test_a_dtype_without_a_type_is_of_the_default_one() -> None:
    for operation in known():
        if operation.types is DType.BF16 and not operation.is_plain:
            assert of_dtype(operations.suffix(operation)).dtype == operation.dtype


def names(model: DeviceModel) -> tuple[str, ...]:
    """As answers, pages, messages and the README name a model."""
    short = model.name.removeprefix("NVIDIA ").split()[0]
    count = f"{model.sm_count} SMs"
    return (
        *(model.slug, model.name, f"{model.name}, {count}", f"{model.name} ({count})"),
        *(f"{model.name} ({model.slug})", short, short.lower()),
    )


def test_every_name_of_a_device_is_accepted(tmp_path: Path) -> None:
    catalogue = Catalogue(lambda: list(models().values()), None)
    for model in models().values():
        for name in names(model):
            assert called(name, models()) == [model.slug], name
            assert catalogue.resolve(None, name) == model


def test_commands_accept_every_name_of_a_recorded_device(tmp_path: Path) -> None:
    settings = Settings.load({}, database=f"sqlite:///{tmp_path}/none.db")
    model = model_of(settings, None)
    for name in names(model):
        assert model_of(settings, name) == model
    for name in ("h200", "replay:H200", "replay:NVIDIA H200"):
        assert open_device(name).model == model


def test_a_device_that_is_not_there_is_no_other_one() -> None:
    h100 = "nvidia-h100-80gb-hbm3-132sm"
    assert called("nvidia-h100-132sm", [h100]) == []
    assert called("H100, 132 SMs", [h100]) == []
    assert called("gh200", models()) == called("", models()) == called("132sm", models()) == []
    pcie = replace(models()[h100], name="NVIDIA H100 PCIe", sm_count=114).slug
    assert called("h100", [h100, pcie]) == [h100, pcie]
    assert called("H100 PCIe", [h100, pcie]) == [pcie]
    plain = replace(models()[h100], name="NVIDIA H100").slug
    assert called("NVIDIA H100", [h100, plain]) == [plain]


def test_the_form_tunes_the_operation_that_an_address_names(tmp_path: Path) -> None:
    """And no plainer one, as the first of a menu that lacks it would be."""
    with running(new_settings(tmp_path)) as http:
        for problem in samples():
            page = http.get(addresses.tune(problem, "nvidia-h200-132sm")).text
            options = re.findall(r'<option value="([^"]*)" selected>', page)
            assert options[:2] == [problem.dtype, problem.layout.value]
            offered = present(re.search(r'<select id="dtype".*?</select>', page, re.DOTALL))
            assert {*OFFERED} <= {*re.findall(r'<option value="([^"]*)"', offered[0])}


def test_pages_take_a_device_by_any_of_its_names(tmp_path: Path) -> None:
    settings = new_settings(tmp_path)
    problem = Problem(512, 512, 1024)
    promote(settings, winner(problem))
    with running(settings) as http:
        for name in names(H200):
            for path in ("/best", "/winners", "/snapshot", "/ui/problems", "/ui", "/ui/map"):
                asked = {"m": 512, "n": 512, "k": 1024} if path == "/best" else {}
                assert http.get(path, params={"device": name} | asked).status_code == 200, path
            assert http.get(f"/ui/problems/{quote(name)}/bf16/tn/512x512x1024").status_code == 200
            form = http.get("/ui/tune", params={"device": name}).text
            assert f'<option value="{H200.slug}" selected>' in form
            order = http.post("/tune", json={"m": 8, "n": 8, "k": 8, "device": name}).json()
            assert order["device"] == H200.slug
        refused = http.get("/best", params={"m": 8, "n": 8, "k": 8, "device": "h300"})
        assert refused.status_code == 422
        assert H200.slug in refused.json()["detail"]
        typo = http.get("/best", params={"m": 8, "n": 8, "k": 8, "epilogue": "bias_gelo"}).json()
        assert "did you mean bias_gelu" in typo["detail"]


def test_every_model_of_the_suites_is_found_with_all_its_products(tmp_path: Path) -> None:
    """By its name, also together with a type."""
    settings = new_settings(tmp_path)
    of_model = {item.problem for item in products(of_suites("llama-3-8b"), 4096, "bf16")}
    other = Problem(m=333, n=555, k=777)
    promote(settings, *map(winner, [*of_model, other]))
    with Store.open(settings.database) as store:
        for text in ("llama-3-8b", "LLAMA-3-8b bf16", "llama"):
            listed = store.listing.winners(H200.slug, parse(text, known()), limit=50)
            assert {item.problem for item in listed.items} == of_model, text
        one = parse("llama-3-8b m=128256", known())
        listed = store.listing.winners(H200.slug, one, limit=50)
        assert [str(item.problem) for item in listed.items] == ["128256×4096×4096 bf16 nt"]
    for name in by_model():
        for word in name.split():
            assert parse(word).layers or word.isdigit() or word in ("over", "ranks"), name
    for wrong, said in (("lhama-3-8b", "llama-3-8b"), ("ll", "'ll'")):
        with pytest.raises(SearchError, match=f"cannot be read: '{wrong}'.*{said}|{said}"):
            parse(wrong)
