"""The fleet's Kubernetes files, as far as they can be held without a cluster.

`render` knows the few forms that the chart's templates use, and refuses any other. Where Helm is
installed, or its own code as `pip install helm-python-sdk`, it has to make the same of them.
"""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from service.cli.main import app
from service.settings import PREFIX, Settings

DEPLOY = Path(__file__).resolve().parents[2] / "configs" / "deploy"
CHART = DEPLOY / "chart"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def render(text: str, values: dict[str, Any]) -> str:
    """What Helm makes of a template that has values, the release's name and plain conditions."""

    def value(path: str) -> Any:
        if path == ".Release.Name":
            return "tests"
        found: Any = {"Values": values}
        for name in path.removeprefix(".").split("."):
            found = found[name]
        return found

    condition = re.compile(r"\{\{- if (\.\S+) \}\}(.*?)\{\{- end \}\}", re.DOTALL)
    text = condition.sub(lambda found: found[2] if value(found[1]) else "", text)
    text = re.sub(r"\{\{ (\.[\w.]+) \}\}", lambda found: str(value(found[1])), text)
    assert "{{" not in text, "a form that this does not know"
    return text


def documents(values: dict[str, Any]) -> list[dict[str, Any]]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(CHART.glob("templates/*.yaml"))]
    return [each for text in texts for each in yaml.safe_load_all(render(text, values)) if each]


def helm_template(values: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """What Helm itself makes of the chart."""
    if shutil.which("helm"):
        given = folder / "values.yaml"
        given.write_text(yaml.safe_dump(values))
        command = ["helm", "template", "tests", str(CHART), "--values", str(given)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [each for each in yaml.safe_load_all(done.stdout) if each]
    helm = pytest.importorskip("helm_python", reason="no Helm: pip install helm-python-sdk")
    findings = helm.lint(CHART, values, strict=True)
    assert not findings["errors"], findings
    made = helm.Chart.load(CHART).render(values, name="tests").values()
    return [each for text in made for each in yaml.safe_load_all(text) if each]


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    templates = [spec.get("template"), spec.get("headGroupSpec", {}).get("template")]
    templates += [group["template"] for group in spec.get("workerGroupSpecs", [])]
    return [each for found in templates if found for each in found["spec"]["containers"]]


def test_the_chart_has_what_it_says_and_leaves_out_what_is_turned_off() -> None:
    kinds = [(found["kind"], found["metadata"]["name"]) for found in documents(VALUES)]
    assert sorted(kinds) == [
        ("Deployment", "tests-service"),
        ("RayCluster", "tests"),
        ("Service", "tests"),
        ("Service", "tests-postgresql"),
        ("StatefulSet", "tests-postgresql"),
    ]
    without = copy.deepcopy(VALUES)
    without["postgresql"]["enabled"] = without["fleet"]["enabled"] = False
    assert [found["kind"] for found in documents(without)] == ["Deployment", "Service"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["apiVersion"] == "v2"


@pytest.mark.parametrize("enabled", [True, False])
def test_helm_makes_the_same_of_the_chart(enabled: bool, tmp_path: Path) -> None:
    values = copy.deepcopy(VALUES)
    values["postgresql"]["enabled"] = values["fleet"]["enabled"] = enabled

    def by_name(found: dict[str, Any]) -> tuple[str, str]:
        return found["kind"], found["metadata"]["name"]

    made = sorted(helm_template(values, tmp_path), key=by_name)
    assert made == sorted(documents(values), key=by_name)


def test_every_value_is_used() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in CHART.glob("templates/*.yaml"))

    def leaves(values: dict[str, Any], path: str) -> list[str]:
        return [
            leaf
            for name, value in values.items()
            for leaf in (
                leaves(value, f"{path}.{name}") if isinstance(value, dict) else [f"{path}.{name}"]
            )
        ]

    for leaf in leaves(VALUES, ".Values"):
        assert re.search(rf"{re.escape(leaf)}\b", text), leaf


def test_the_manifest_is_the_chart_s_fleet() -> None:
    manifest = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text(encoding="utf-8"))
    (fleet,) = (found for found in documents(VALUES) if found["kind"] == "RayCluster")
    fleet["metadata"]["name"] = manifest["metadata"]["name"]
    assert manifest == fleet


@pytest.mark.parametrize("container", [c for d in documents(VALUES) for c in containers(d)])
def test_containers_have_settings_that_exist_and_start_commands_that_parse(
    container: dict[str, Any],
) -> None:
    names = {each["name"] for each in container.get("env", [])}
    ours = {name for name in names if name.startswith(PREFIX)}
    assert ours <= {PREFIX + field.upper() for field in Settings.model_fields}
    assert ours or container["name"] == "postgresql"
    mounted = {each["mountPath"] for each in container["volumeMounts"]}
    for each in container.get("env", []):
        if str(each.get("value", "")).startswith("/"):
            assert any(each["value"].startswith(path) for path in mounted), each
    for words in re.findall(r"gemmsmith ([a-z][\w -]*)", str(container.get("command", ""))):
        assert CliRunner().invoke(app, [*words.split(), "--help"]).exit_code == 0, words


def test_the_cluster_runs_the_ray_that_is_locked() -> None:
    (fleet,) = (found for found in documents(VALUES) if found["kind"] == "RayCluster")
    assert fleet["spec"]["rayVersion"] == version("ray")
    (gpus, compilers) = fleet["spec"]["workerGroupSpecs"]
    limits = [
        g["template"]["spec"]["containers"][0]["resources"]["limits"] for g in (gpus, compilers)
    ]
    assert ["nvidia.com/gpu" in limit for limit in limits] == [True, False]
