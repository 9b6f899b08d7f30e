"""Clock, power, temperature and throttle reasons of a GPU, through NVML.

Through cuda-python's NVML bindings. A `Monitor` without NVML reads zeros, which mean "unknown". A
reading that the driver refuses is zero too; monitoring never makes a measurement fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from gemmsmith.answers.answer import Conditions

FRESH_S = 0.1
"""How long a reading is used again: a new one for every candidate would only cost time."""

_SM_CLOCK = 1  # nvmlClockType_t
_GPU_SENSOR = 0  # nvmlTemperatureSensors_t
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT
_REASONS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
    0x100: "display_clock_setting",
}
"""nvmlClocksEventReasons bits; GPU idle (0x1) is not throttling and is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The GPU's state at one moment; zeros mean unknown."""

    sm_clock_mhz: int = 0
    power_w: float = 0.0
    temperature_c: int = 0
    reasons: int = 0


class Monitor:
    """Reads one GPU's state. `Monitor("")` reads zeros."""

    def __init__(self, gpu_uuid: str) -> None:
        self._calls: dict[str, Callable[[], Any]] = {}
        self._errors: tuple[type[Exception], ...] = (RuntimeError, OSError)
        self.driver_version = ""
        self._latest = Reading()
        self._read_at = -FRESH_S
        if gpu_uuid:
            self._open(gpu_uuid)

    def read(self) -> Reading:
        """A new reading; takes a few milliseconds, depending on the driver."""
        self._latest = Reading(
            sm_clock_mhz=self.sm_clock_mhz(),
            # Since Ampere "power" is a mean over a second: longer than the rounds of a regime.
            power_w=(self._ask("power now") or self._ask("power")) / 1000,
            temperature_c=self._ask("temperature"),
            reasons=self._ask("reasons"),
        )
        self._read_at = time.monotonic()
        return self._latest

    def sm_clock_mhz(self) -> int:
        return self._ask("clock")

    def energy_j(self) -> float:
        """Joules since the driver was loaded, updated every few tens of ms; 0 if unknown."""
        return self._ask("energy") / 1000

    def power_limit_w(self) -> float:
        """Watts beyond which the driver lowers the clock; 0 if unknown."""
        return self._ask("limit") / 1000

    def recent(self) -> Reading:
        if time.monotonic() - self._read_at < FRESH_S:
            return self._latest
        return self.read()

    def _ask(self, name: str) -> int:
        call = self._calls.get(name)
        if call is None:
            return 0
        try:
            return int(call())
        except self._errors:
            del self._calls[name]  # this driver does not support it: do not call it again
            return 0

    def _open(self, gpu_uuid: str) -> None:
        from cuda.bindings import nvml

        self._errors = (nvml.NvmlError, RuntimeError, OSError)
        try:
            nvml.init_v2()
            handle = nvml.device_get_handle_by_uuid(gpu_uuid)
            self.driver_version = nvml.system_get_driver_version()
        except self._errors:
            return
        self._calls = {
            "clock": lambda: nvml.device_get_clock_info(handle, _SM_CLOCK),
            "power now": partial(_power_now, nvml, handle),
            "power": lambda: nvml.device_get_power_usage(handle),
            "temperature": lambda: nvml.device_get_temperature_v(handle, _GPU_SENSOR),
            "reasons": lambda: nvml.device_get_current_clocks_event_reasons(handle),
            "energy": lambda: nvml.device_get_total_energy_consumption(handle),
            "limit": lambda: nvml.device_get_enforced_power_limit(handle),
        }


def _power_now(nvml: Any, handle: int) -> int:
    """Milliwatts; 0 if the driver or the bindings do not support field values."""
    if not hasattr(nvml, "FieldValue"):
        return 0
    field = nvml.FieldValue(1)
    field.field_id = _POWER_INSTANT
    nvml.device_get_field_values(handle, field)
    return 0 if field.nvml_return else int(field.value.ui_val[0])


def conditions_of(readings: Sequence[Reading]) -> Conditions:
    """Medians over the known values; the union of the throttle reasons."""
    active = 0
    for reading in readings:
        active |= reading.reasons
    return Conditions(
        sm_clock_mhz=_median([r.sm_clock_mhz for r in readings]),
        power_w=_median([r.power_w for r in readings]),
        temperature_c=_median([r.temperature_c for r in readings]),
        throttle=tuple(name for bit, name in _REASONS.items() if active & bit),
    )


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if value > 0]
    return round(median(known), 1) if known else 0.0
