"""Distributes a snapshot to all ranks of a job, so that all ranks run the same kernels.

Ranks that run different kernels compute different bits from the same inputs, and their speeds
differ. Only rank 0 fetches the snapshot. The result or the error reaches every rank through the
process group, so no rank waits for ever.

`shared_snapshot` is a collective, which a program calls on all ranks. `agreed_snapshot` uses only
the group's store, and so it also works while the devices of the group may not be set up.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from gemmsmith.answers.snapshot import Snapshot
from gemmsmith.errors import SnapshotUnavailable

if TYPE_CHECKING:
    import torch.distributed
    from torch._C._distributed_c10d import Store


def shared_snapshot(
    fetch: Callable[[], Snapshot | None],
    group: torch.distributed.ProcessGroup | None = None,
    *,
    check: Callable[[Snapshot], None] | None = None,
) -> Snapshot | None:
    """Returns the result of `fetch` on the group's rank 0, on every rank of the group.

    This is a collective: every rank of `group` (default: all ranks) calls it. `fetch` is called on
    rank 0 only. It works with gloo and NCCL (for NCCL, call `torch.cuda.set_device` first). The
    group's time limit must be longer than rank 0 takes. Without a process group, this process is
    rank 0. Use the result pinned: `Lookup(snapshot, pin=True)`.

    `check` is called on every rank with the snapshot. If it raises on a rank, for example because
    the rank does not trust the signer (`gemmsmith.winners.packs.believe`), the call fails on all.

    Raises:
        SnapshotUnavailable: on every rank, if `fetch` raised on rank 0 or `check` on any rank.
    """
    import torch.distributed as dist

    together = dist.is_available() and dist.is_initialized()
    document: bytes | None = None
    reason = ""
    cause: BaseException | None = None
    if not together or dist.get_rank(group) == 0:
        try:
            fetched = fetch()
        except BaseException as error:  # noqa: BLE001 - the other ranks wait for an answer
            cause = error
            # The other ranks get the message, because an exception may not survive pickling.
            reason = f"{type(error).__name__}: {error}"
        else:
            document = None if fetched is None else fetched.document
    if together:
        shared = [(document, reason)]
        dist.broadcast_object_list(shared, group=group, group_src=0)
        document, reason = shared[0]
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # Ctrl-C, for example, is not a failure to fetch
    if reason:
        raise SnapshotUnavailable(f"rank 0 could not fetch the snapshot: {reason}") from cause
    snapshot = None if document is None else Snapshot.parse(document)
    if snapshot is not None and check is not None:
        reasons = [_reason_against(check, snapshot)]
        if together:
            own, reasons = reasons[0], [""] * dist.get_world_size(group)
            dist.all_gather_object(reasons, own, group=group)
        for rank, reason_against in enumerate(reasons):
            if reason_against:
                raise SnapshotUnavailable(
                    f"rank {rank} does not take the snapshot: {reason_against}"
                )
    return snapshot


def _reason_against(check: Callable[[Snapshot], None], snapshot: Snapshot) -> str:
    """Why this rank rejects the snapshot; empty if it accepts it."""
    try:
        check(snapshot)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer
        return f"{type(error).__name__}: {error}"
    return ""


def agreed_snapshot(
    fetch: Callable[[], Snapshot],
    store: Store,
    rank: int,
    world: int,
    *,
    check: Callable[[Snapshot], None],
    timeout_s: float,
) -> Snapshot:
    """Returns the result of `fetch` on rank 0, on every rank, once all ranks accept it.

    It needs no device. Every rank calls it with a store that is used for this call only. If a rank
    waits longer than `timeout_s` seconds, the call fails on all ranks, so that no rank runs winners
    that others do not run.

    Raises:
        SnapshotUnavailable: `fetch` raised on rank 0, `check` raised on any rank, or a rank is
            missing.
    """
    wait = timedelta(seconds=timeout_s)
    if rank == 0:
        try:
            store.set("snapshot", "+" + fetch().document.decode())
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer
            store.set("snapshot", f"-{type(error).__name__}: {error}")
    try:
        store.wait(["snapshot"], wait)
        document = store.get("snapshot")
        if document[:1] == b"-":
            reason = document[1:].decode(errors="replace")
            raise SnapshotUnavailable(f"rank 0 could not fetch the snapshot: {reason}")
        snapshot = Snapshot.parse(document[1:])
        reason_against = _reason_against(check, snapshot)
        if reason_against:
            _decide(store, f"rank {rank} does not take the snapshot: {reason_against}")
        elif store.add("takers", 1) == world:
            _decide(store, _AGREED)
        store.wait(["decision"], wait)
    except RuntimeError as error:  # torch's DistStoreError: the wait timed out
        _decide(store, f"rank {rank} waited {timeout_s:.0f} s for the other ranks: {error}")
    decision = store.get("decision").decode(errors="replace")
    if decision != _AGREED:
        raise SnapshotUnavailable(decision)
    return snapshot


_AGREED = "agreed"


def _decide(store: Store, decision: str) -> None:
    # An atomic operation: the first decision of any rank is final.
    store.compare_set("decision", "", decision)
