"""The learned part of the cost model: boosted trees that correct the analytic one.

The predicted time is the analytic one × exp(trees(features)): where the trees know nothing they
say what the analytic model says. They are trained on log(measured / analytic), every problem
counting alike, candidates near its fastest more than the rest. What counts is the mean of a few
forests that differ in their seed; the same measurements always give the same ones. A model belongs
to one device model; its file tells what it was trained on.

LightGBM is the optional extra `model`. Whatever keeps a model from being used raises
`ModelUnusable`; `best_ranker` ranks with the analytic part alone then.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import zstandard

from gemmsmith.candidate import Candidate
from gemmsmith.device import DeviceModel, Environment
from gemmsmith.files import publish
from gemmsmith.problem import Problem
from gemmsmith.version import VERSION as GEMMSMITH
from tuner.arch import MEASURED
from tuner.errors import TunerError
from tuner.search.cost_model import AnalyticModel
from tuner.search.features import FEATURES, FEATURES_VERSION, Measured, features
from tuner.search.ranking import Ranker

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

FORMAT = "gemmsmith-cost-model"
VERSION = 2
FOLDER = Path("configs/models")
SUFFIX = ".json.zst"

FAST = 1.3
"""Candidates within this factor of their problem's fastest are the ones that order matters for."""
FAST_WEIGHT = 4.0
"""Not tuned: candidates among the fast ones count four times the others of their problem."""

ROUNDS = 150
"""Held-out problems were ranked alike, within the spread of a few seeds, by half and twice as many
trees, other shares of features and of rows, and targets without each problem's own level (shipped
sweeps of an NVIDIA H200, 2026-11-21). So these are not tuned further: 22 problems cannot tell."""
SEEDS = (1, 2, 3, 4, 5)
"""One forest each. Alone, a forest's seed moved the worst held-out regret of quick tunings between
4% and 16%; the mean of five stays under 5% (22 recorded problems, NVIDIA H200, 2026-11-21)."""
PARAMETERS: dict[str, str | int | float | bool] = {
    "objective": "regression",
    "learning_rate": 0.1,
    "num_leaves": 15,
    "min_data_in_leaf": 20,
    "feature_fraction": 0.7,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,
    "verbosity": -1,
}

_LEVEL = 19
_LOG = logging.getLogger(__name__)


class ModelUnusable(TunerError):
    """A learned model that cannot be trained, read or asked; the message says what to do."""


class ModelLibraryMissing(ModelUnusable):
    """LightGBM, or a library that it needs, is not installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedOn:
    """A problem that a model has seen, and how many of its candidates."""

    problem: Problem
    trials: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What a model is and where it comes from. `held_out`: how well it ranked unseen problems."""

    features_version: int
    features: tuple[str, ...]
    device: str
    arch: str
    trained_at: str
    gemmsmith: str
    library: str
    parameters: dict[str, str | int | float | bool]
    seeds: tuple[int, ...]
    rounds: int
    trials: int
    problems: tuple[TrainedOn, ...]
    environments: tuple[Environment, ...]
    held_out: dict[str, dict[str, float]] = field(default_factory=dict)


class LearnedModel:
    """A cost model: the analytic one, corrected by trees.

    Raises:
        ModelUnusable: no LightGBM, or trees that it cannot read or that know other features.
    """

    def __init__(self, card: Card, trees: Sequence[str]) -> None:
        lightgbm = _lightgbm()
        try:
            self._forests = [lightgbm.Booster(model_str=text) for text in trees]
        except lightgbm.basic.LightGBMError as error:
            raise ModelUnusable(f"the model's trees cannot be read: {error}") from error
        if any(tuple(forest.feature_name()) != FEATURES for forest in self._forests):
            raise ModelUnusable(f"the model's trees know other features; {_REFIT}")
        if not trees:
            raise ModelUnusable(f"the model has no trees; {_REFIT}")
        self.card = card
        self._trees = trees

    def predict(
        self, problem: Problem, candidates: Sequence[Candidate], device: DeviceModel
    ) -> list[float]:
        """Predicted microseconds per launch, one for each candidate, in their order.

        Give all candidates that are to be compared at once: see `features`.
        """
        import numpy

        if device.arch != self.card.arch:
            raise ModelUnusable(f"the model is of {self.card.arch}, not of {device.arch}")
        if not candidates:
            return []
        analytic = AnalyticModel().predict(problem, candidates, device)
        rows = numpy.array(features(problem, candidates, device, analytic), dtype=float)
        each = [numpy.asarray(forest.predict(rows, num_threads=1)) for forest in self._forests]
        correction = numpy.mean(each, axis=0)
        times: list[float] = (numpy.array(analytic) * numpy.exp(correction)).tolist()
        return times

    def judged(self, held_out: dict[str, dict[str, float]]) -> Self:
        """The same model, its card telling how well models like it rank unseen problems."""
        return type(self)(replace(self.card, held_out=held_out), self._trees)

    def save(self, path: Path) -> None:
        """Write the model's file: one JSON document, compressed, atomically."""
        document = {"format": FORMAT, "version": VERSION, "card": self.card, "trees": self._trees}
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        publish(path, compressor.compress(msgspec.json.encode(document)), shared=True)

    @classmethod
    def load(cls, path: Path, *, arch: str | None = None) -> Self:
        """Read a model's file; of `arch` only, by default of any architecture known here.

        Raises:
            ModelUnusable: unreadable, of another version, features or architecture, or no LightGBM.
        """
        try:
            data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
            document = msgspec.json.decode(data, type=dict[str, Any])
        except (OSError, zstandard.ZstdError, msgspec.DecodeError) as error:
            raise ModelUnusable(f"cannot read the model {path}: {error}") from error
        if document.get("format") != FORMAT:
            raise ModelUnusable(f"{path} is no cost model of gemmsmith's")
        if document.get("version") != VERSION:
            raise ModelUnusable(
                f"{path} has format version {document.get('version')}, this gemmsmith reads "
                f"{VERSION}; {_REFIT}"
            )
        raw = document.get("card")
        version = raw.get("features_version") if isinstance(raw, dict) else None
        if version != FEATURES_VERSION:
            raise ModelUnusable(
                f"{path} was trained on version {version} of the features, this gemmsmith has "
                f"{FEATURES_VERSION}; {_REFIT}"
            )
        try:
            card = msgspec.convert(raw, Card)
            trees = msgspec.convert(document.get("trees"), list[str])
        except msgspec.ValidationError as error:
            raise ModelUnusable(f"{path} is damaged: {error}") from error
        if card.arch not in ((arch,) if arch else MEASURED):
            wanted = arch or ", ".join(MEASURED)
            raise ModelUnusable(f"{path} is a model of {card.arch}, not of {wanted}")
        return cls(card, trees)


_REFIT = "fit it again: gemmsmith model fit"


def path_for(slug: str, folder: Path = FOLDER) -> Path:
    """The model file of a device model. A slug is not trusted to be a file's name."""
    return folder / f"{re.sub(r'[^a-z0-9._-]+', '-', slug)}{SUFFIX}"


def best_ranker(device_slug: str, folder: Path = FOLDER) -> Ranker:
    """The device model's learned model where there is a usable one, else the analytic one."""
    path = path_for(device_slug, folder)
    if not path.is_file():
        return AnalyticModel()
    try:
        model = LearnedModel.load(path)
    except ModelUnusable as error:
        level = logging.INFO if isinstance(error, ModelLibraryMissing) else logging.WARNING
        _LOG.log(level, "%s; the analytic cost model ranks alone", error)
        return AnalyticModel()
    if model.card.device != device_slug:
        theirs = model.card.device
        _LOG.warning("%s is a model of %s; the analytic cost model ranks alone", path, theirs)
        return AnalyticModel()
    return model


def fit(measured: Sequence[Measured], *, trained_at: str) -> LearnedModel:
    """Train on everything given. The same measurements and date give the same model.

    Raises:
        ModelUnusable: nothing to learn from, several device models, or no LightGBM.
    """
    devices = {one.device.slug: one.device for one in measured}
    if len(devices) != 1:
        found = ", ".join(sorted(devices)) or "nothing"
        raise ModelUnusable(f"a model learns from one device model's measurements, got {found}")
    lightgbm = _lightgbm()
    import numpy

    parts = [_examples(one) for one in measured]
    rows, targets, weights = (numpy.concatenate(part) for part in zip(*parts, strict=True))
    data = lightgbm.Dataset(rows, label=targets, weight=weights, feature_name=list(FEATURES))
    forests = [
        lightgbm.train({**PARAMETERS, "seed": seed}, data, num_boost_round=ROUNDS) for seed in SEEDS
    ]
    (device,) = devices.values()
    card = Card(
        features_version=FEATURES_VERSION,
        features=FEATURES,
        device=device.slug,
        arch=device.arch,
        trained_at=trained_at,
        gemmsmith=GEMMSMITH,
        library=f"lightgbm {lightgbm.__version__}",
        parameters=dict(PARAMETERS),
        seeds=SEEDS,
        rounds=ROUNDS,
        trials=len(targets),
        problems=tuple(TrainedOn(problem=o.problem, trials=len(o.times_us)) for o in measured),
        environments=tuple(dict.fromkeys(e for one in measured for e in one.environments)),
    )
    return LearnedModel(card, [forest.model_to_string() for forest in forests])


@lru_cache(maxsize=64)
def _examples(one: Measured) -> tuple[NDArray[float64], NDArray[float64], NDArray[float64]]:
    """Feature rows, targets and weights of one problem; the weights add up to 1000.

    Remembered, because models are trained without each problem in turn, and on all others again.
    """
    import numpy

    analytic = AnalyticModel().predict(one.problem, one.candidates, one.device)
    rows = numpy.array(features(one.problem, one.candidates, one.device, analytic), dtype=float)
    times = numpy.array(one.times_us)
    weights = numpy.where(times <= FAST * times.min(), FAST_WEIGHT, 1.0)
    return rows, numpy.log(times / numpy.array(analytic)), weights * (1000 / weights.sum())


def _lightgbm() -> Any:
    try:
        import lightgbm
    except ImportError as error:
        raise ModelLibraryMissing(
            f"no LightGBM ({error}): pip install 'gemmsmith-service[model]'"
        ) from error
    except OSError as error:  # its own library is there, the one that it links is not
        raise ModelLibraryMissing(
            f"LightGBM cannot be loaded ({error}): install libgomp (Debian package libgomp1)"
        ) from error
    return lightgbm
