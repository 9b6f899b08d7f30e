"""All ranks of a distributed job read one snapshot, so that all of them choose alike.

Ranks that choose differently compute different bits from the same inputs, and those that find a
kernel to load where others find none drift apart in time. Only one rank asks the service; what it
gets, or why it got nothing, reaches every rank through the process group, so none waits for ever.

`shared_snapshot` does so with a collective, wherever a program calls it on all ranks. Where nobody
may know whether the group's devices are set up, `agreed_snapshot` does with its store alone.
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
    """What `fetch` gives on the group's rank 0, on every rank of the group.

    A collective: every rank of `group` (default: all) calls it, and `fetch` is called on rank 0
    only. Works on gloo and NCCL (for NCCL, call `torch.cuda.set_device` first). The group's time
    limit must be longer than rank 0 takes. Without a process group, rank 0 is this process. Use
    the result pinned: `Lookup(snapshot, pin=True)`.

    `check` is called on every rank with what arrived, and raises where the rank will not run it
    (`gemmsmith.winners.packs.believe`): then none does.

    Raises:
        SnapshotUnavailable: `fetch` raised on rank 0, or `check` on some rank; on every rank alike.
    """
    import torch.distributed as dist

    together = dist.is_available() and dist.is_initialized()
    document: bytes | None = None
    reason = ""
    cause: BaseException | None = None
    if not together or dist.get_rank(group) == 0:
        try:
            found = fetch()
        except BaseException as error:  # noqa: BLE001 - the other ranks wait for an answer
            cause = error
            # An exception of somebody else's need not survive pickling; its words do.
            reason = f"{type(error).__name__}: {error}"
        else:
            document = None if found is None else found.document
    if together:
        shared = [(document, reason)]
        dist.broadcast_object_list(shared, group=group, group_src=0)
        document, reason = shared[0]
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # Ctrl-C is no failure to fetch
    if reason:
        raise SnapshotUnavailable(f"rank 0 could not fetch the snapshot: {reason}") from cause
    snapshot = None if document is None else Snapshot.parse(document)
    if snapshot is not None and check is not None:
        said = [_refusal(check, snapshot)]
        if together:
            own, said = said[0], [""] * dist.get_world_size(group)
            dist.all_gather_object(said, own, group=group)
        for rank, refusal in enumerate(said):
            if refusal:
                raise SnapshotUnavailable(f"rank {rank} does not take the snapshot: {refusal}")
    return snapshot


def _refusal(check: Callable[[Snapshot], None], snapshot: Snapshot) -> str:
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
    """What `fetch` gives on rank 0, on every rank, once all of them take it; without a device.

    Every rank calls it, with a store of its own for this one time. Who waits longer than
    `timeout_s` seconds decides for all that there is none: no rank runs winners that others do not.

    Raises:
        SnapshotUnavailable: `fetch` raised on rank 0, `check` on some rank, or a rank did not come.
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
        refusal = _refusal(check, snapshot)
        if refusal:
            _decide(store, f"rank {rank} does not take the snapshot: {refusal}")
        elif store.add("takers", 1) == world:
            _decide(store, _AGREED)
        store.wait(["decision"], wait)
    except RuntimeError as error:  # torch's DistStoreError: timed out
        _decide(store, f"rank {rank} waited {timeout_s:.0f} s for the other ranks: {error}")
    decision = store.get("decision").decode(errors="replace")
    if decision != _AGREED:
        raise SnapshotUnavailable(decision)
    return snapshot


_AGREED = "agreed"


def _decide(store: Store, decision: str) -> None:
    """Decide for all ranks, unless one has."""
    store.compare_set("decision", "", decision)
