"""`gemmsmith best --model`: the sums are those of the winners, here and through a service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import run, use
from tests.support.serving import new_settings, running
from tests.support.shipped import SLUG, TRUSTED, shipped_files
from tuner.exchange import import_winners, read_winners
from tuner.store import Store

FILES = [file for file in shipped_files() if file.name == f"{SLUG}.bf16.jsonl"]
WINNERS = {str(winner.problem): winner for file in FILES for winner in read_winners(file)}
ASKED = ("best", "--model", "llama-3-8b", "--tokens", 4096)


def test_sums_are_those_of_the_winners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = use(new_settings(tmp_path), monkeypatch)
    with Store.open(settings.database) as store:
        import_winners(store, FILES[0], TRUSTED)
    database = ("--database", settings.database, "--device", SLUG)
    document = json.loads(run(*ASKED, *database, "--json").stdout)
    assert len(document["products"]) == 15
    before = after = 0.0
    for row in document["products"]:
        winner = WINNERS.get(row["problem"])
        assert (winner is None) == (row["default_us"] is None), row
        if winner is None:
            continue
        assert winner.baseline
        assert winner.speedup
        assert row["default_us"] == winner.baseline.median_us
        assert row["use"] == winner.use
        gain = 1.0 if winner.use.is_default else winner.speedup.median
        before += winner.baseline.median_us
        after += winner.baseline.median_us / gain
    assert document["default_ms"] == pytest.approx(before / 1e3)
    assert document["ms"] == pytest.approx(after / 1e3)
    assert 0 < document["ms"] <= document["default_ms"]
    printed = run(*ASKED, *database)
    assert f"{before / 1e3:.3f} ms by default, {after / 1e3:.3f} ms as served" in printed.stdout
    missing = len(document["products"]) - document["tuned"]
    assert f"{missing} products without a winner" in printed.stderr
    with running(settings) as http:  # whose log is on the same stdout
        said = run(*ASKED, "--url", http.base_url, "--device", SLUG, "--json").stdout
    served, _ = json.JSONDecoder().raw_decode(said[said.index("{\n") :])
    assert served == document


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "llama-3-8b"), "with --tokens N"),
        (("--tokens", 64), "give --model NAME or --config FILE"),
        ((8, 8, 8, "--model", "llama-3-8b", "--tokens", 64), "not both"),
        (("--model", "llama-3-8b", "--config", "x", "--tokens", 64), "give --model NAME or"),
        (("--model", "nothing", "--tokens", 64), "no model 'nothing'"),
        (("--config", "missing.json", "--tokens", 64), "no file missing.json"),
        ((4096, 6144), "three sizes M N K are needed, got 2"),
    ],
)
def test_options_that_contradict_each_other(words: tuple[object, ...], said: str) -> None:
    assert said in run("best", *words, code=2).stderr
