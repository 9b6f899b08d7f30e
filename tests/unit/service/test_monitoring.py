"""The dashboard and the alerts ask for what a service that has worked tells."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from service.worker import process
from tests.support import fake_nvcc
from tests.support.docs import ROOT
from tests.support.processes import until
from tests.support.recordings import record
from tests.support.serving import new_settings, running
from tuner.devices.replay import ReplayDevice

DEPLOY = ROOT / "configs" / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]] + [
    rule["expr"] for rule in RULES
]
OPERATION = (ROOT / "docs" / "operation.md").read_text(encoding="utf-8")

PROMETHEUS_OWN = {"instance", "job"}
"""Labels that Prometheus adds to whatever it scrapes."""

Series = dict[str, dict[str, set[str]]]
"""Name of a sample → its labels → their values."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`/metrics` of a service with a lookup of each kind and a job that compiled and measured."""
    folder = tmp_path_factory.mktemp("monitoring")
    problem = Problem(m=256, n=4096, k=4096)
    settings = new_settings(folder, device="replay:h200")
    record(settings.sweeps, problem)
    compiler = fake_nvcc.toolchain(folder / "toolchain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.worker.builder.find_toolchain", lambda: compiler)
        patch.setattr(ReplayDevice, "needs_packs", True)
        with running(settings) as client:
            client.get("/metrics")  # times of jobs are followed from the first reading on
            body = {"m": 256, "n": 4096, "k": 4096, "effort": Effort.QUICK}
            assert client.post("/tune", json=body).status_code == 202
            assert process.run(settings, until_idle=True) == 1
            assert client.get("/best?m=256&n=4096&k=4096").status_code == 200
            text = ""

            def is_read() -> bool:
                nonlocal text
                text = client.get("/metrics").text
                done = 'gemmsmith_jobs_ended_total{outcome="done"} 1.0' in text
                return done and "gemmsmith_trials_total{" in text

            until(is_read, "the job was not told of")
            yield text


@pytest.fixture(scope="module")
def series(told: str) -> Series:
    found: Series = defaultdict(lambda: defaultdict(set))
    for family in text_string_to_metric_families(told):
        for sample in family.samples:
            labels = found[sample.name]
            for label, value in sample.labels.items():
                labels[label].add(value)
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_is_told(query: str, series: Series) -> None:
    names = set(re.findall(r"\b(?:gemmsmith|process)_\w+", query))
    assert names or query.startswith("up{"), query
    assert names <= series.keys()
    known = {label for name in names for label in series[name]} | PROMETHEUS_OWN
    for labels in re.findall(r"\b(?:by|without|ignoring|on) \(([\w, ]+)\)", query):
        assert set(labels.split(", ")) <= known, query
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", query):
        for label, operator, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', matchers):
            if label in PROMETHEUS_OWN or operator == "=~":
                assert label in known
            else:
                assert value in series[name][label], (name, label, value)


def test_counters_are_asked_for_their_increase_only() -> None:
    for query in QUERIES:
        for name, after in re.findall(r"(gemmsmith_\w+_total)(?:\{[^}]*\})?(\[)?", query):
            assert after, f"{name} in {query}"


def test_a_panel_can_be_read() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in DASHBOARD["panels"]]
    for place, (x, y, width, height) in enumerate(places):
        assert x + width <= 24
        for other_x, other_y, other_width, other_height in places[:place]:
            apart = x >= other_x + other_width or x + width <= other_x
            assert apart or y >= other_y + other_height or y + height <= other_y
    for panel in PANELS:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        targets = [target["refId"] for target in panel["targets"]]
        assert len(targets) == len(set(targets))
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"\b{label}\b", target["expr"]) or label in PROMETHEUS_OWN
    assert DASHBOARD["templating"]["list"][0]["name"] == "datasource"
    assert "id" not in DASHBOARD  # Grafana gives it one


def test_the_dashboard_shows_what_operators_ask_for() -> None:
    shown = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    for name in (
        "gemmsmith_lookups_total",
        "gemmsmith_request_seconds_bucket",
        'gemmsmith_jobs{state="waiting"}',
        "gemmsmith_job_phase_seconds_total",
        "gemmsmith_trials_total",
        "gemmsmith_compile_seconds_total",
        "gemmsmith_device_busy_seconds_total",
        "gemmsmith_job_kernels_total",
        "gemmsmith_answers_total",
    ):
        assert name in shown, name


def test_every_alert_is_explained() -> None:
    listed = re.findall(r"^\| `(Gemmsmith\w+)` \|", OPERATION, re.MULTILINE)
    assert listed == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["for"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]


def test_the_docs_list_every_metric_with_its_labels(told: str) -> None:
    rows = re.findall(r"^\| `(gemmsmith_\w+)` \|([^|]*)\| (\w+) \|", OPERATION, re.MULTILINE)
    documented = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels, _ in rows}
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(told):
        if family.name.startswith("gemmsmith_"):
            suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
            name = family.name.removesuffix(suffix) + suffix
            found[name] = {
                label for sample in family.samples for label in sample.labels if label != "le"
            }
    assert documented == found


def test_prometheus_takes_the_files_and_every_alert_fires() -> None:
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    (scraped,) = config["scrape_configs"]
    assert 'up{job="%s"}' % scraped["job_name"] in QUERIES[-len(RULES)]  # noqa: UP031 - braces
    assert config["rule_files"] == ["alerts.yml"]
    wrong = Path(__file__).with_name("alerts.yml").read_text(encoding="utf-8")
    assert all(f'alertname="{rule["alert"]}"' in wrong for rule in RULES)
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    for command in (
        ["check", "config", str(DEPLOY / "prometheus.yml")],
        ["test", "rules", str(Path(__file__).with_name("alerts.yml"))],
    ):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
