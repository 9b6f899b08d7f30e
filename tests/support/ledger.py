"""Checks a database after a fault: nothing is lost, duplicated or incomplete."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from gemmsmith.core.tuning import JobState
from tuner.compile import ArtifactStore
from tuner.store import Store
from tuner.store.models import DeviceRow, JobEventRow, JobRow, TrialRow, WinnerRow

FINAL = {"finished": JobState.DONE, "failed": JobState.FAILED, "cancelled": JobState.CANCELLED}


def verify(url: str, accepted: Collection[str]) -> Counter[str]:
    """Check every job, winner and trial. Returns the final states of the `accepted` jobs."""
    with Store.open(url) as store, store.database.read() as session:
        _database_is_whole(session, sqlite=store.database.is_sqlite)
        jobs = {row.public_id: row for row in session.scalars(select(JobRow))}
        lost = set(accepted) - jobs.keys()
        assert not lost, f"accepted, and gone: {lost}"
        for job in jobs.values():
            _job_ended_once(session, job)
        for winner in session.scalars(select(WinnerRow).where(WinnerRow.origin != "imported")):
            _winner_has_its_trials(session, winner)
        _one_winner_is_served(session)
        return Counter(jobs[identifier].state for identifier in accepted)


def verify_packs(url: str, folder: Path) -> None:
    """Check that all packs in the folder are complete, and that cleaning leaves no other files."""
    packs = ArtifactStore(folder).packs()
    assert packs
    for path in folder.iterdir():
        os.utime(path, (1, 1))  # as if an hour had passed
    ArtifactStore(folder)._prepare()  # cleans up, as before each publication
    left = {path.name for path in folder.iterdir()}
    assert left == {f"{pack.hash}.{kind}" for pack in packs for kind in ("so", "json")}
    with Store.open(url) as store, store.database.read() as session:
        for name in session.scalars(select(WinnerRow.pack).where(WinnerRow.pack.is_not(None))):
            assert name in {pack.hash for pack in packs}, f"a winner's pack {name} is not here"


def _database_is_whole(session: Session, *, sqlite: bool) -> None:
    if sqlite:
        assert session.scalars(text("PRAGMA integrity_check")).all() == ["ok"]
        assert session.execute(text("PRAGMA foreign_key_check")).all() == []
        return
    session.execute(text("CREATE EXTENSION IF NOT EXISTS amcheck"))
    trees = "SELECT bt_index_check(c.oid, true) FROM pg_class c JOIN pg_am a ON a.oid = c.relam "
    session.execute(text(trees + "WHERE a.amname = 'btree' AND c.relkind = 'i'")).all()


def _job_ended_once(session: Session, job: JobRow) -> None:
    query = select(JobEventRow).where(JobEventRow.job_id == job.id).order_by(JobEventRow.number)
    events = session.scalars(query).all()
    kinds = [event.kind for event in events]
    summary = f"job {job.public_id} ({job.state}, attempt {job.attempt}): {kinds}"
    assert [event.number for event in events] == list(range(1, job.last_event + 1)), summary
    assert [kind for kind in kinds if kind in FINAL] == kinds[-1:], f"no end, or several; {summary}"
    assert job.state == FINAL[kinds[-1]], summary
    assert kinds[0] == "created", summary
    assert kinds.count("started") == job.attempt, summary
    assert (job.active_key, job.lease_expires_at) == (None, None), summary
    promoted = session.scalars(select(WinnerRow.digest).where(WinnerRow.job == job.public_id)).all()
    # An attempt may promote twice: the best compiled kernel, and a better one after more
    # compilations. After a kill it may repeat what another job of the problem replaced meanwhile.
    assert len(promoted) <= 2 * job.attempt, f"promoted {len(promoted)} times; {summary}"
    assert job.attempt > 1 or len(promoted) == len(set(promoted)), f"promoted twice; {summary}"
    if job.state != JobState.DONE:
        return
    (winner,) = [event.data for event in events if event.kind == "winner"]
    assert winner["revision"] == job.winner_revision, summary
    of_job = (
        select(func.count())
        .select_from(WinnerRow)
        .join(DeviceRow, DeviceRow.id == WinnerRow.device_id)
        .where(WinnerRow.problem_id == job.problem_id, DeviceRow.slug == winner["device"])
        .where(WinnerRow.revision == job.winner_revision)
    )
    assert session.scalar(of_job) == 1, summary


def _winner_has_its_trials(session: Session, winner: WinnerRow) -> None:
    """Check that the job that promoted each winner had measured its candidate in the finals."""
    if winner.kernel_id is None:
        return
    measured = session.scalars(
        select(TrialRow.median_us).where(
            TrialRow.job == winner.job,
            TrialRow.problem_id == winner.problem_id,
            TrialRow.kernel_id == winner.kernel_id,
            TrialRow.phase == "final",
        )
    ).all()
    assert winner.median_us in measured, f"winner {winner.id} of job {winner.job} has no trial"


def _one_winner_is_served(session: Session) -> None:
    pairs = (WinnerRow.problem_id, WinnerRow.device_id)
    current = func.sum(func.cast(WinnerRow.is_current, type_=JobRow.done.type))
    counts = session.execute(select(*pairs, current).group_by(*pairs)).all()
    assert all(count == 1 for *_, count in counts), counts
