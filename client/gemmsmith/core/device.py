"""Where a measurement was made: the GPU model and the software around it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceModel:
    """A kind of GPU. Two GPUs of one model share winners; `slug` is the model's identity.

    Attributes:
        name: as the driver reports it, such as `NVIDIA H200`.
        arch: `sm90` and so on.
        sm_count: streaming multiprocessors.
        memory_bytes: global memory of the GPU; problems must fit in it.
        l2_bytes: size of the L2 cache.
        max_clock_mhz: highest SM clock; 0 when unknown.
        memory_bandwidth: peak bytes per second of global memory; 0 when unknown.
    """

    name: str
    arch: str
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    max_clock_mhz: int = 0
    memory_bandwidth: int = 0

    @property
    def slug(self) -> str:
        """The model's identity in URLs and keys: `nvidia-h200-132sm`."""
        return f"{self.name.lower().replace(' ', '-')}-{self.sm_count}sm"


def time_text(us: float, recorded: str = "", digits: int = 2) -> str:
    """`12.34 µs`, or `12.34 µs (recorded H200)` if the time was recorded on that GPU model."""
    text = f"{us:.{digits}f} µs"
    return f"{text} ({recording_of(recorded)})" if recorded else text


def recording_of(name: str) -> str:
    return f"recorded {name.removeprefix('NVIDIA ')}"


def called(name: str, slugs: Iterable[str]) -> list[str]:
    """The slugs of the device models that a name may mean.

    `nvidia-h200-132sm`, `NVIDIA H200, 132 SMs`, `NVIDIA H200` and `h200` all name the same model.
    A name with a number of SMs must match completely. Returns several slugs if they match the name
    equally well.
    """
    words, count = _words(name)
    models = {slug: _words(slug) for slug in slugs}
    if count:
        return [slug for slug, model in models.items() if model == (words, count)]
    same = [slug for slug, (model, _) in models.items() if model == words]
    return same or [slug for slug, (model, _) in models.items() if words and words <= model]


def _words(name: str) -> tuple[frozenset[str], str]:
    """The words of a model's name, and its number of SMs as in slugs (`132sm`), empty if absent."""
    joined = re.sub(r"\b([0-9]+) ?sms?\b", r"\1sm", name.lower())
    words = frozenset(re.findall(r"[a-z0-9]+", joined))
    count = next((word for word in words if re.fullmatch("[0-9]+sm", word)), "")
    return words - {count}, count


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The software and the individual GPU that a trial ran on. Empty strings: not applicable."""

    gpu_uuid: str
    driver: str
    cuda: str
    cutlass: str
    compiler: str
    torch: str
    cublas: str
    gemmsmith: str

    @property
    def digest(self) -> str:
        """Short hash of all fields. Trials with the same digest are comparable."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def same_software(self, other: Environment) -> bool:
        return replace(self, gpu_uuid="") == replace(other, gpu_uuid="")
