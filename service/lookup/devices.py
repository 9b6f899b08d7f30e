"""The device models that the service knows, and which of them a request without a name means.

The service's own GPU comes first, then the model of the setting `default_model`, then the other
models of the store. The list is read again if no model on it fits, since a worker elsewhere may
just have added a model, and if `service.lookup.watcher` notices a new model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import StrEnum

from gemmsmith.core.device import DeviceModel, called
from gemmsmith.core.problem import Problem
from service.errors import invalid_field
from tuner.workloads.footprint import footprint_bytes


class Arch(StrEnum):
    """Architectures that winners exist for."""

    SM90 = "sm90"  # Hopper: H100, H200, H20


class Catalogue:
    """Known device models. `read` lists those of the store."""

    def __init__(
        self,
        read: Callable[[], Sequence[DeviceModel]],
        local: DeviceModel | None,
        default: str = "",
    ) -> None:
        self.local = local
        self._default = default
        self._read = read
        self._models: list[DeviceModel] = []
        self._is_read = False
        self._reading = threading.Lock()

    def known(self, *, refresh: bool = False) -> list[DeviceModel]:
        """All known models, the service's own GPU first, the default model before the others."""
        with self._reading:  # so that an older list never replaces a newer list
            if refresh or not self._is_read:
                local = [self.local] if self.local is not None else []
                slugs = {model.slug for model in local}
                others = [model for model in self._read() if model.slug not in slugs]
                self._models = local + default_first(others, self._default)
                self._is_read = True
            return self._models

    def resolve(self, arch: Arch | None, name: str | None) -> DeviceModel | None:
        """The model that the request means. Returns None if no model fits.

        Raises:
            ProblemError: no such device, or it is of another architecture.
        """
        if not name:
            for refresh in (False, True):
                for model in self.known(refresh=refresh):
                    if arch is None or model.arch == arch:
                        return model
            return None
        model = self.named(name)
        if arch is not None and model.arch != arch:
            raise invalid_field(
                "device", f"{model.slug} is {model.arch}, not {arch}", f"an {arch} GPU"
            )
        return model

    def named(self, name: str) -> DeviceModel:
        """The model with a name that users type, see `gemmsmith.core.device.called`.

        Raises:
            ProblemError: no such device, or several.
        """
        for refresh in (False, True):
            models = {model.slug: model for model in self.known(refresh=refresh)}
            if name in models:
                return models[name]
        slugs = called(name, models)
        if len(slugs) == 1:
            return models[slugs[0]]
        accepted = ", ".join(slugs or models) or "none yet; tune a problem first"
        message = f"{'ambiguous' if slugs else 'unknown'}: {name!r:.80}"
        raise invalid_field("device", message, accepted)


def default_first(models: Sequence[DeviceModel], name: str) -> list[DeviceModel]:
    """The models; the model that users call by that name comes first."""
    first = called(name, [model.slug for model in models])
    return sorted(models, key=lambda model: model.slug not in first)  # stable


def check_fits(problem: Problem, model: DeviceModel | None, *, measured: bool = False) -> None:
    """Refuse a problem that the device's memory cannot hold.

    With `measured`, what measuring needs beside the operands counts too.

    Raises:
        ProblemError: it does not fit; the message has both sizes.
    """
    if model is None:
        return
    needed = footprint_bytes(problem) if measured else problem.operand_bytes
    if needed <= model.memory_bytes:
        return
    purpose = " to be measured" if measured else ""
    raise invalid_field(
        max(("m", "n", "k", "batch"), key=lambda name: int(getattr(problem, name))),
        f"{problem} takes {needed / 2**30:,.1f} GiB of device memory{purpose}, more than "
        f"{model.name} has",
        f"sizes whose A, B and D{' and their verification' if measured else ''} fit in "
        f"{model.memory_bytes / 2**30:.1f} GiB",
    )
