"""The learned cost model: the same measurements give the same model, and no other is believed."""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from gemmsmith.candidate import Candidate
from gemmsmith.device import DeviceModel
from gemmsmith.problem import Problem
from tests.support.serving import ENVIRONMENT, H100, H200
from tuner.backends import candidates
from tuner.devices.recording import Sweep
from tuner.search import learned
from tuner.search.cost_model import AnalyticModel
from tuner.search.features import Measured, gathered, observed_in_sweep
from tuner.search.learned import (
    SUFFIX,
    LearnedModel,
    ModelLibraryMissing,
    ModelUnusable,
    best_ranker,
    fit,
    path_for,
)
from tuner.search.ranking import ranked

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ROOT / "configs" / "models"
NOW = "2026-11-21T09:00:00+00:00"
PROBLEM = Problem(m=128, n=4096, k=2048)


def measured(problem: Problem, device: DeviceModel = H200) -> Measured:
    """Swapped kernels take twice what the analytic model thinks, the others half."""
    found = candidates(problem, device)
    analytic = AnalyticModel().predict(problem, found, device)
    times = [us * (2.0 if c.kernel.swapped else 0.5) for c, us in zip(found, analytic, strict=True)]
    return Measured(
        problem=problem,
        device=device,
        environments=(ENVIRONMENT,),
        candidates=tuple(found),
        times_us=tuple(times),
    )


MEASURED = [measured(Problem(m=m, n=4096, k=1024)) for m in (64, 256)]


@pytest.fixture(scope="module")
def model() -> LearnedModel:
    return fit(MEASURED, trained_at=NOW)


def predictions(model: Any, problem: Problem = PROBLEM) -> list[float]:
    found: list[float] = model.predict(problem, candidates(problem, H200), H200)
    return found


def rewritten(path: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model's file with other members; `card` members are merged."""
    document = msgspec.json.decode(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
    document |= {name: value for name, value in changes.items() if name != "card"}
    document["card"] |= changes.get("card", {})
    target.write_bytes(zstandard.ZstdCompressor().compress(msgspec.json.encode(document)))
    return target


def test_it_learns_what_the_analytic_model_does_not_know(model: LearnedModel) -> None:
    found = candidates(PROBLEM, H200)
    analytic = AnalyticModel().predict(PROBLEM, found, H200)
    for candidate, before, after in zip(found, analytic, predictions(model), strict=True):
        factor = 2.0 if candidate.kernel.swapped else 0.5
        assert after / before == pytest.approx(factor, rel=0.05)
    order = ranked(PROBLEM, found, H200, model)
    assert not any(candidate.kernel.swapped for candidate in order[:50])


def test_no_candidates_no_predictions(model: LearnedModel) -> None:
    assert model.predict(PROBLEM, [], H200) == []


def test_two_fits_are_the_same_to_the_byte(model: LearnedModel, tmp_path: Path) -> None:
    first, second = tmp_path / f"a{SUFFIX}", tmp_path / f"b{SUFFIX}"
    model.save(first)
    learned._examples.cache_clear()  # what they learn from is worked out twice as well
    fit(MEASURED, trained_at=NOW).save(second)
    assert first.read_bytes() == second.read_bytes()


def test_a_saved_model_is_the_same_when_loaded(model: LearnedModel, tmp_path: Path) -> None:
    path = tmp_path / f"m{SUFFIX}"
    model = model.judged({"learned": {"rank_median": 1.0}})
    model.save(path)
    loaded = LearnedModel.load(path, arch="sm90")
    assert loaded.card == model.card
    assert predictions(loaded) == predictions(model)
    again = tmp_path / f"n{SUFFIX}"
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()


def test_the_card_says_what_it_was_trained_on(model: LearnedModel) -> None:
    card = model.card
    assert (card.device, card.arch, card.trained_at) == (H200.slug, "sm90", NOW)
    assert [each.problem for each in card.problems] == [each.problem for each in MEASURED]
    assert card.trials == sum(each.trials for each in card.problems)
    assert card.environments == (ENVIRONMENT,)
    assert card.library.startswith("lightgbm ")
    assert card.held_out == {}
    assert model.judged({"learned": {"rank_median": 1.0}}).card.held_out["learned"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"card": {"features_version": 0}}, "version 0 of the features"),
        ({"card": {"features_version": None}}, "version None of the features"),
        ({"version": 1}, "format version 1"),
        ({"format": "gemmsmith-ceilings"}, "no cost model"),
        ({"card": {"arch": "sm100"}}, "a model of sm100, not of sm90"),
        ({"card": {"trials": "many"}}, "damaged"),
        ({"trees": None}, "damaged"),
        ({"trees": []}, "no trees"),
    ],
)
def test_other_models_are_refused(
    model: LearnedModel, tmp_path: Path, changes: Mapping[str, Any], said: str
) -> None:
    path = path_for(H200.slug, tmp_path)
    model.save(path)
    rewritten(path, path, **changes)
    with pytest.raises(ModelUnusable, match=said):
        LearnedModel.load(path)
    assert isinstance(best_ranker(H200.slug, tmp_path), AnalyticModel)


@pytest.mark.parametrize("data", [b"", b"not zstd", zstandard.ZstdCompressor().compress(b"[1]")])
def test_damaged_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / f"m{SUFFIX}"
    path.write_bytes(data)
    with pytest.raises(ModelUnusable, match="cannot read the model"):
        LearnedModel.load(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match=f"absent{SUFFIX}"):
        LearnedModel.load(tmp_path / f"absent{SUFFIX}")


def test_another_architecture_is_refused(model: LearnedModel, tmp_path: Path) -> None:
    path = tmp_path / f"m{SUFFIX}"
    model.save(path)
    with pytest.raises(ModelUnusable, match="of sm90, not of sm100"):
        LearnedModel.load(path, arch="sm100")
    other = DeviceModel(name="B200", arch="sm100", sm_count=148, memory_bytes=1, l2_bytes=1)
    with pytest.raises(ModelUnusable, match="of sm90, not of sm100"):
        model.predict(PROBLEM, candidates(PROBLEM, H200), other)


def test_trees_of_other_features_are_refused(model: LearnedModel, tmp_path: Path) -> None:
    path, other = tmp_path / f"m{SUFFIX}", tmp_path / f"o{SUFFIX}"
    model.save(path)
    document = msgspec.json.decode(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
    trees = [
        forest.replace("feature_names=log2_k ", "feature_names=log3_k ")
        for forest in document["trees"]
    ]
    with pytest.raises(ModelUnusable, match="other features"):
        LearnedModel.load(rewritten(path, other, trees=trees))


def test_nothing_and_several_devices_teach_nothing() -> None:
    with pytest.raises(ModelUnusable, match="got nothing"):
        fit([], trained_at=NOW)
    with pytest.raises(ModelUnusable, match=f"{H100.slug}, {H200.slug}"):
        fit([*MEASURED, measured(PROBLEM, H100)], trained_at=NOW)


def test_the_best_ranker_is_the_device_models_own(
    model: LearnedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(best_ranker(H200.slug, tmp_path), AnalyticModel)
    model.save(path_for(H200.slug, tmp_path))
    assert predictions(best_ranker(H200.slug, tmp_path)) == predictions(model)
    assert isinstance(best_ranker(H100.slug, tmp_path), AnalyticModel)
    assert not caplog.records
    model.save(path_for(H100.slug, tmp_path))  # copied to another GPU's name
    assert isinstance(best_ranker(H100.slug, tmp_path), AnalyticModel)
    assert "is a model of nvidia-h200-132sm" in caplog.text


def test_a_slug_is_not_a_path(tmp_path: Path) -> None:
    assert path_for("../../etc/passwd", tmp_path).parent == tmp_path


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ModuleNotFoundError("No module named 'lightgbm'"), "pip install"),
        (OSError("libgomp.so.1: cannot open shared object file"), "libgomp1"),
    ],
)
def test_without_the_library_the_analytic_model_ranks_alone(
    model: LearnedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    advice: str,
) -> None:
    path = path_for(H200.slug, tmp_path)
    model.save(path)
    real = builtins.__import__

    def refusing(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.split(".")[0] == "lightgbm":
            raise error
        return real(name, *arguments, **keywords)

    monkeypatch.delitem(sys.modules, "lightgbm")
    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(ModelLibraryMissing, match=advice):
        LearnedModel.load(path)
    with pytest.raises(ModelLibraryMissing, match=advice):
        fit(MEASURED, trained_at=NOW)
    with caplog.at_level(logging.INFO):
        assert isinstance(best_ranker(H200.slug, tmp_path), AnalyticModel)
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_the_shipped_model_knows_the_shipped_sweeps() -> None:
    """It has seen these problems: what it says of them must be close, or it is another's model."""
    for path in sorted((ROOT / "configs" / "sweeps").glob("*.zst")):
        shipped = gathered(observed_in_sweep(Sweep.load(path)))
        (slug,) = {one.device.slug for one in shipped}
        ranker = best_ranker(slug, SHIPPED)
        assert isinstance(ranker, LearnedModel)
        assert sum(_error(one, ranker) for one in shipped) / len(shipped) < 0.07  # 0.057, 0.051


def _error(one: Measured, ranker: LearnedModel) -> float:
    times: Sequence[float] = ranker.predict(one.problem, one.candidates, one.device)
    errors = sorted(abs(a / b - 1) for a, b in zip(times, one.times_us, strict=True))
    return errors[len(errors) // 2]


def test_ranking_with_it_is_deterministic(model: LearnedModel) -> None:
    found: list[Candidate] = candidates(PROBLEM, H200)
    order = ranked(PROBLEM, found, H200, model)
    assert ranked(PROBLEM, found[::-1], H200, model) == order
