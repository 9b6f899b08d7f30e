"""`gemmsmith.use`: sets where this process gets its winners and their packs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING, TypeAlias

import torch

from gemmsmith.core.device import DeviceModel, called
from gemmsmith.core.numerics import demands_order
from gemmsmith.distributed import shared_snapshot
from gemmsmith.errors import GemmsmithError, NotInvariant
from gemmsmith.http.client import Client
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install, is_demanded_now
from gemmsmith.ops.engine.planning import Chooser, PackSource
from gemmsmith.winners.bundle import Bundle
from gemmsmith.winners.lookup import Lookup
from gemmsmith.winners.packs import Packs, asking, believe

if TYPE_CHECKING:
    from gemmsmith.answers.snapshot import Snapshot

log = logging.getLogger("gemmsmith")

Source: TypeAlias = "Client | Bundle | str | PathLike[str] | tuple[Chooser | Snapshot, PackSource]"


def use(
    source: Source | None,
    *,
    pin: bool = False,
    deterministic: bool | None = None,
    device: str | None = None,
    numerics: str | None = None,
) -> None:
    """Run the winners of `source` in `gemmsmith.matmul`, `linear`, `scaled_mm` and `patch`.

    Patches that are open run them from now on, in every thread.

    Args:
        source: a Client or the URL of a service; a Bundle or its path (`winners.gspack`); a pair of
            a Lookup or Snapshot and the source of its packs; None: torch's own operators again.
        pin: keep the current winners; else newer ones of the service are used when they appear.
        deterministic: True: only kernels that give the same bits for the same inputs; None: as
            set by `torch.use_deterministic_algorithms` at each call.
        device: slug of the device model; by default that of the current GPU.
        numerics: "invariant": a row of a product has the same bits at every M. Products of bf16 and
            fp16, and of FP8 with factors of rows, run kernels of one order of sums, or raise
            `NotInvariant` (docs/invariance.md). Without winners, `use` raises.

    In a distributed job this is a collective: rank 0 asks the service, and all ranks keep the same
    winners, pinned. If there are no winners, or they have no trusted signature, torch's own
    operators run, and the log `gemmsmith` gives the reason.

    Raises:
        TypeError: `source` has another type.
        ValueError: the URL or `numerics` is invalid.
        NotInvariant: there are no winners, and `numerics` or an open patch demands them.
        OSError: there is no such bundle.
    """
    while _before_use:
        _before_use.pop()()
    is_invariant = demands_order(numerics) or is_demanded_now()
    if source is None:
        if is_invariant:
            raise NotInvariant("numerics='invariant' needs winners: undo its patch first")
        install(None, "gemmsmith.use(None) has switched winners off")
        return
    model = device or local_model()
    try:
        chooser, packs = _opened(source, pin, model)
    except GemmsmithError as error:
        _refuse(str(error), is_invariant)
        return
    tuned_for = getattr(getattr(chooser, "snapshot", None), "device", model)
    if model is not None and not called(model, [str(tuned_for)]):
        _refuse(f"the winners are for {tuned_for}, and this GPU is {model}", is_invariant)
        return
    install(Engine(chooser, packs, deterministic=deterministic, numerics=numerics))


def _refuse(reason: str, is_invariant: bool) -> None:
    if is_invariant:
        raise NotInvariant(f"numerics='invariant' needs winners: {reason}")
    log.warning("torch's own operators run: %s", reason)
    install(None, f"gemmsmith.use(...) took no winners: {reason}")


def on_use(react: Callable[[], object]) -> None:
    """Have `react` called at the program's next call of `use`, which overrides its environment."""
    _before_use[:] = [react]


_before_use: list[Callable[[], object]] = []


def _opened(source: Source, pin: bool, device: str | None) -> tuple[Chooser, PackSource]:
    if isinstance(source, tuple) and len(source) == 2:
        chooser, packs = source
        return (chooser if hasattr(chooser, "lookup") else Lookup(chooser, pin=True)), packs
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        source = Client(source)
    if isinstance(source, Client):
        client = source
        check = partial(believe, how=asking(client))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            shared = shared_snapshot(lambda: client.snapshot(device), check=check)
            assert shared is not None  # noqa: S101 - a client returns a snapshot or raises
            lookup = Lookup(shared, pin=True, url=client.url)
        else:
            lookup = Lookup.of(client, device, pin=pin)
            check(lookup.snapshot)
        return lookup, Packs.of(client, signed=lambda: lookup.snapshot)
    if isinstance(source, str | PathLike):
        source = Bundle.open(fspath(source))
    if isinstance(source, Bundle):
        believe(source.snapshot)
        return Lookup(source.snapshot, pin=True), source.packs
    raise TypeError(
        "source must be a Client, a service's URL, a Bundle or its path, or a pair of a lookup and "
        f"packs, got {type(source).__name__}"
    )


def local_model() -> str | None:
    """Slug of this process's GPU. Returns None without a GPU."""
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return DeviceModel(
        name=gpu.name,
        arch=f"sm{gpu.major}{gpu.minor}",
        sm_count=gpu.multi_processor_count,
        memory_bytes=gpu.total_memory,
        l2_bytes=getattr(gpu, "L2_cache_size", 0),
    ).slug
