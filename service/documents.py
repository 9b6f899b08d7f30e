"""JSON answers: the core's dataclasses through msgspec, plus the links that lead on from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, urlencode

import msgspec
from starlette.responses import Response

from gemmsmith.answers.answer import Answer
from gemmsmith.answers.snapshot import Row, Snapshot
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Config, Match
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import JobState
from gemmsmith.http.replies import SCHEMA
from gemmsmith.signing import Signer
from service.errors import ProblemError
from service.tables import timestamp as timestamp
from tuner.compile import Manifest
from tuner.explain import Explanation
from tuner.jobs import Job, RecordedEvent
from tuner.store import StoredTrial
from tuner.store.served import Served
from tuner.trial import Winner


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """`content` (builtins, dataclasses, enums) as a JSON response."""
    return Response(
        msgspec.json.encode(content),
        status_code=status,
        media_type="application/json",
        headers=dict(headers or {}),
    )


def history_url(problem: Problem, device: str) -> str:
    return best_url(problem, device, "/winners/history")


def best_url(problem: Problem, device: str | None = None, path: str = "/best") -> str:
    # Written out: of a cold batch of thousands, quoting what needs none took a third of the time.
    batch = f"&batch={problem.batch}" if problem.batch != 1 else ""
    words = f"&dtype={problem.dtype}&layout={problem.layout.value}"
    on = f"&device={quote_plus(device)}" if device else ""
    return f"{path}?m={problem.m}&n={problem.n}&k={problem.k}{batch}{words}{on}"


def tune_link(problem: Problem, device: str | None = None) -> dict[str, Any]:
    """How to request the tuning of `problem`, body included."""
    body = msgspec.to_builtins(problem)
    if device:
        body["device"] = device
    return {"href": "/tune", "method": "POST", "body": body}


def not_tuned(problem: Problem, device: DeviceModel | None, *, exact: bool) -> ProblemError:
    """The 404 of a lookup without an answer, with a link to tune the problem."""
    where = f" on {device.name}" if device else ""
    near = "" if exact or device is None else ", nor is any kernel legal for it"
    return ProblemError(
        status=404,
        kind="not-tuned",
        title="Not tuned yet",
        detail=f"No winner is known for {problem}{where}{near}. Request a tuning job: POST /tune.",
        links={"tune": tune_link(problem, device.slug if device else None)},
    )


def answer(item: Answer) -> dict[str, Any]:
    """The JSON of a lookup's answer."""
    links: dict[str, Any] = {"self": {"href": best_url(item.problem, item.device.slug)}}
    # Kernels are described once something ran them; a proposal's may never have been.
    if item.config is not None and (item.predicted_us is None or item.config.pack is not None):
        links["kernel"] = {"href": f"/kernels/{quote(item.config.kernel.name)}"}
        if item.config.pack is not None:
            links["pack"] = {"href": f"/packs/{item.config.pack}"}
    if item.match is not Match.EXACT:
        links["tune"] = tune_link(item.problem, item.device.slug)
    fields: dict[str, Any] = msgspec.to_builtins(item)
    if item.predicted_us is None:
        del fields["predicted_us"]  # what was measured has no use for it
    return {**fields, "links": links}


def job(item: Job, waits: str = "") -> dict[str, Any]:
    """The JSON of a job; `waits` says what a waiting one waits for, if that is known."""
    here = f"/jobs/{item.id}"
    links: dict[str, Any] = {"self": {"href": here}, "events": {"href": f"{here}/events"}}
    if item.state is JobState.DONE:
        links["best"] = {"href": best_url(item.problem)}
    if not item.state.terminal:
        links["cancel"] = {"href": here, "method": "DELETE"}
    elif item.state is not JobState.DONE:
        links["retry"] = {"href": f"{here}/retry", "method": "POST"}
    times = {
        name: timestamp(getattr(item, name))
        for name in ("created_at", "started_at", "finished_at", "deadline_at")
    }
    reason = {"waits": waits} if waits else {}
    return {**msgspec.to_builtins(item), **times, **reason, "links": links}


def job_event(event: RecordedEvent) -> dict[str, Any]:
    return {**event.data, "job": event.job, "at": timestamp(event.at)}


def device(model: DeviceModel, *, default: bool, local: bool) -> dict[str, Any]:
    """The JSON of a device model; `default` is the one that lookups without `device` mean."""
    return {
        "slug": model.slug,
        **msgspec.to_builtins(model),
        "default": default,
        "local": local,
        "links": {"results": {"href": f"/results?{urlencode({'device': model.slug})}"}},
    }


def snapshot(
    device: str,
    winners: Iterable[Winner],
    *,
    pack_of: Callable[[Winner], str | None],
    signer: Signer | None = None,
) -> Snapshot:
    """The winners of the device model `device` (its slug) as clients hold them.

    `pack_of` names the pack that a winner's kernel runs from; None if it cannot run.
    """
    packs = ((winner, pack_of(winner) if winner.candidate else None) for winner in winners)
    rows = [row(winner, config(winner.candidate, pack)) for winner, pack in packs]
    return Snapshot.of(device, rows, signer)


def config(candidate: Candidate | None, pack: str | None) -> Config | None:
    if candidate is None:
        return None
    return Config(kernel=candidate.kernel, launch=candidate.launch, pack=pack)


def row(winner: Winner | Served, config: Config | None) -> Row:
    """The winner as a row of a snapshot, with its config."""
    environment = _digest(winner.environment)
    if winner.candidate is None or config is None:
        return Row(
            problem=winner.problem, use=winner.use, stale=winner.stale, environment=environment
        )
    return Row(
        problem=winner.problem,
        use=winner.use,
        config=config,
        deterministic=winner.candidate.has_fixed_order,
        stale=winner.stale,
        saving_us=winner.saving_us,
        time_us=winner.time_us,
        environment=environment,
    )


@functools.lru_cache(maxsize=1024)
def _digest(environment: Environment) -> str:
    """There are few: to hash one for each of many winners took as long as to write them."""
    return environment.digest


def explanation(item: Explanation) -> dict[str, Any]:
    """The JSON of an explanation."""
    links = {"best": {"href": best_url(item.problem, item.device.slug)}}
    return {**msgspec.to_builtins(item), "links": links}


def pack(pack_hash: str, manifest: Manifest) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(manifest)
    del fields["format"], fields["taken"]  # of the file on this machine's disk
    return {"hash": pack_hash, **fields, "links": {"self": {"href": f"/packs/{pack_hash}"}}}


def trial(stored: StoredTrial) -> dict[str, Any]:
    """The JSON of a recorded trial."""
    return {
        "id": stored.id,
        "created_at": timestamp(stored.created_at),
        **msgspec.to_builtins(stored.trial),
    }


def winner(item: Winner) -> dict[str, Any]:
    links = {"best": {"href": best_url(item.problem, item.device.slug)}}
    return {**msgspec.to_builtins(item), "links": links}


def page(
    name: str,
    items: Iterable[Any],
    following: str | None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """One page of a list as a JSON response.

    `following` is the next page's URL, if there may be one. Items are encoded one by one: 4 MB in
    one go keep the event loop waiting for 10 ms, as nothing else runs meanwhile.
    """
    links = {"next": {"href": following}} if following else {}
    parts = (name.encode(), b",".join(map(msgspec.json.encode, items)), msgspec.json.encode(links))
    return Response(
        b'{"schema":%d,"%s":[%s],"links":%s}' % (SCHEMA, *parts),
        media_type="application/json",
        headers=dict(headers or {}),
    )
