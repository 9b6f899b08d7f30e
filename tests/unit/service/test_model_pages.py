"""The models' pages: their sums are those of the winners, and searches lead to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape

import httpx
import pytest

from service.pages import addresses
from service.pages.search import models_named, parse
from tests.support.serving import new_settings, running
from tests.support.shipped import SLUG, TRUSTED, shipped_files
from tuner.exchange import import_winners, read_winners
from tuner.models import by_model, of_suites, products, tokens_of
from tuner.store import Store
from tuner.suites import Pass

FILES = [
    file
    for file in shipped_files()
    if file.name in (f"{SLUG}.bf16.jsonl", f"{SLUG}.bf16.group_rows.jsonl")
]
WINNERS = {winner.problem: winner for file in FILES for winner in read_winners(file)}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = new_settings(tmp_path_factory.mktemp("models"))
    with Store.open(settings.database) as store:
        for file in FILES:
            import_winners(store, file, TRUSTED)
    with running(settings) as client:
        yield client


def shown(http: httpx.Client, name: str, **query: object) -> str:
    answer = http.get(addresses.model(name, **query))
    assert answer.status_code == 200, answer.text
    return unescape(answer.text)


def cells(text: str, first: str) -> list[str]:
    """The cells of the row of the first table that begins with this one."""
    (row,) = re.findall(rf'<tr><th scope="row">{first}</th>(.*?)</tr>', text, re.DOTALL)
    return re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)


@pytest.mark.parametrize(("name", "tokens"), [("llama-3-8b", 4096), ("gpt-oss-20b", 2048)])
def test_sums_are_those_of_the_winners(http: httpx.Client, name: str, tokens: int) -> None:
    text = shown(http, name, tokens=tokens, device=SLUG)
    assert f"{name}, {tokens} tokens" in text
    made = products(of_suites(name), tokens, "bf16")
    for which in (*Pass, None):
        chosen = [item.problem for item in made if which in (None, item.which)]
        tuned = [WINNERS[problem] for problem in chosen if problem in WINNERS]
        before = after = 0.0
        for winner in tuned:
            assert winner.baseline
            assert winner.speedup
            before += winner.baseline.median_us / 1e3
            gain = 1.0 if winner.use.is_default else winner.speedup.median
            after += winner.baseline.median_us / 1e3 / gain
        row = cells(text, which.value.replace("_", " ") if which else "all")
        assert row[0] == f"{len(tuned)} of {len(chosen)}"
        if tuned:
            assert row[1:] == [f"{before:.3f}", f"{after:.3f}", f"{before / after:.3f}"]
        else:
            assert row[1:] == ["–", "–", "–"]
    for item in made:
        assert (addresses.problem(item.problem, SLUG) in text) == (item.problem in WINNERS)
    assert text.count("not tuned") == sum(item.problem not in WINNERS for item in made)


def test_without_tokens_most_products_are_tuned(http: httpx.Client) -> None:
    layers = of_suites("llama-3-8b")
    counts = {
        tokens: sum(item.problem in WINNERS for item in products(layers, tokens, "bf16"))
        for tokens in tokens_of("llama-3-8b")
    }
    (chosen,) = re.findall(r"<h1>llama-3-8b, (\d+) token", shown(http, "llama-3-8b"))
    assert counts[int(chosen)] == max(counts.values())


def test_every_model_has_a_page_to_which_the_list_leads(http: httpx.Client) -> None:
    listed = http.get(addresses.MODELS, params={"device": SLUG}).text
    assert addresses.MODELS in http.get(addresses.OVERVIEW).text
    for name in by_model():
        address = addresses.model(name, device=SLUG)
        assert f'href="{address}"' in listed, name
        assert f"<h1>{name}, " in shown(http, name, device=SLUG)


@pytest.mark.parametrize(
    ("text", "leads"),
    [
        ("llama", ["llama-3-70b", "llama-3-8b", "llama-3.2-1b", "llama-8b-blocks"]),
        ("bf16 LLAMA-3-8B tn", ["llama-3-8b"]),
        ("3-8b", ["llama-3-8b", "qwen3-8b"]),
        ("mixtral, 4096", ["mixtral-8x7b"]),
        ("350", []),  # sizes, types and layouts are no part of a name
        ("4096x6144 bf16 tn", []),
        ("8x7", []),
        ("group_rows n=4096", []),
        ("", []),
    ],
)
def test_a_search_for_a_model_leads_to_its_page(
    http: httpx.Client, text: str, leads: list[str]
) -> None:
    assert models_named(text) == leads
    assert bool(parse(text).layers) == bool(leads)
    page = http.get(addresses.PROBLEMS, params={"q": text}).text
    assert set(re.findall(r'href="/ui/models/([^"?]+)', page)) == set(leads)


def test_a_wrong_name_or_number_is_said(http: httpx.Client) -> None:
    for path, status, said in (
        ("/ui/models/llama-9", 404, "no model 'llama-9'"),
        ("/ui/models/llama-3-8b?tokens=0", 422, "1 … 2147483647"),
        ("/ui/models/llama-3-8b?dtype=int4", 422, "int4"),
        ("/ui/models/llama-3-8b?device=h900", 422, "h900"),
    ):
        answer = http.get(path, headers={"accept": "text/html"})
        assert answer.status_code == status, path
        assert said in unescape(answer.text)
