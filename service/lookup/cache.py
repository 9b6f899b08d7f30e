"""Answers of lookups as they go over the wire, kept in memory while they are true.

`service.lookup.reader` reads answers from the database, and `service.lookup.watcher` drops those
that may have changed. A hit costs no query. The least recently used answers go first. Threads
share one `Answers`.

An answer is kept only if nothing was dropped since its reading began: each drop begins a new
generation, and `keep` takes the generation in which the reading began. So no answer in memory is
older than the last drop.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

import msgspec

from gemmsmith.answers.answer import Answer
from gemmsmith.core.config import Match
from gemmsmith.core.kernel import Backend
from gemmsmith.core.neighbours import Neighbourhood
from gemmsmith.core.problem import Problem
from gemmsmith.http.requests import RUNS
from service import documents
from service.lookup.abilities import without_config
from service.lookup.find import REACH

_LONGEST_QUERY = 300
"""Bytes of a query string worth keeping; a lookup with every parameter has about 120."""

_NEIGHBOURHOODS = 32
"""With more changed winners of a kind, all answers of that kind are dropped: after an import it
costs less to answer again than to compare every answer with every winner."""

VARY = f"{RUNS}, User-Agent"
"""The request headers that an answer depends on."""

K = TypeVar("K")
V = TypeVar("V")

Key = tuple[str, Problem]
"""A device model's slug, and the problem of the lookup."""

RawHeaders = list[tuple[bytes, bytes]]
"""As ASGI has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """An answer in JSON, and what it depends on.

    Attributes:
        etag: of the body; it differs if anything in the body differs.
        kernel, backend, pack: those of the answer's config; None without a config.
    """

    body: bytes
    etag: str
    match: Match
    device: str
    problem: Problem
    kernel: str | None
    backend: Backend | None
    pack: str | None

    @classmethod
    def of(cls, answer: Answer) -> Self:
        """The answer, rendered."""
        body = msgspec.json.encode(documents.answer(answer))
        return cls(
            body=body,
            etag=f'"{hashlib.blake2s(body, digest_size=12).hexdigest()}"',
            match=answer.match,
            device=answer.device.slug,
            problem=answer.problem,
            kernel=answer.config.kernel.name if answer.config else None,
            backend=answer.config.kernel.backend if answer.config else None,
            pack=answer.config.pack if answer.config else None,
        )

    def without_config(self) -> Rendered:
        """The answer for a client that cannot run the config; rare, so not kept."""
        return Rendered.of(without_config(msgspec.json.decode(self.body, type=Answer)))

    def reply(self, if_none_match: str | None) -> tuple[int, RawHeaders, bytes]:
        """Status, headers and body for a client that sent this `If-None-Match`.

        Clients must revalidate every time: the answer may change at any moment.
        """
        headers = [
            (b"etag", self.etag.encode()),
            (b"cache-control", b"no-cache"),
            (b"vary", VARY.encode()),
        ]
        if if_none_match is not None and self._is_among(if_none_match):
            return 304, headers, b""
        length = b"%d" % len(self.body)
        headers += [(b"content-length", length), (b"content-type", b"application/json")]
        return 200, headers, self.body

    def _is_among(self, tags: str) -> bool:
        # Proxies that compress make strong tags weak.
        known = {tag.strip().removeprefix("W/") for tag in tags.split(",")}
        return "*" in known or self.etag in known


class Answers:
    """The memory: at most `limit` answers, and as many query strings that lead to them.

    Attributes:
        generation: read it before you read from the database what you pass to `keep`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._answers: OrderedDict[Key, Rendered] = OrderedDict()
        self._queries: OrderedDict[bytes, tuple[Key, Collection[Match]]] = OrderedDict()
        self.generation = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get_many(
        self, device: str, problems: Iterable[Problem], accepted: Collection[Match]
    ) -> list[Rendered | None]:
        with self._lock:
            return [self._get((device, problem), accepted) for problem in problems]

    def asked(self, query: bytes) -> Rendered | None:
        """The kept answer to a query string that was passed to `keep_query`."""
        with self._lock:
            known = self._queries.get(query)
            if known is None:
                return None
            self._queries.move_to_end(query)
            return self._get(*known)

    def keep(self, answer: Rendered, generation: int) -> None:
        """Keep an answer whose reading began in that generation, if that is still current."""
        key = (answer.device, answer.problem)
        with self._lock:
            if generation == self.generation:
                _put(self._answers, key, answer, self._limit)

    def keep_query(
        self, query: bytes, answer: Rendered, accepted: Collection[Match], generation: int
    ) -> None:
        """Remember which problem and device the query string is about."""
        if len(query) > _LONGEST_QUERY:
            return
        key = (answer.device, answer.problem)
        with self._lock:
            if generation == self.generation:
                _put(self._queries, query, (key, accepted), self._limit)

    def clear(self) -> None:
        """Drop all answers and query strings."""
        with self._lock:
            self.generation += 1
            self._answers.clear()
            self._queries.clear()

    def drop_changed(self, changed: Iterable[tuple[str, Problem]]) -> None:
        """Drop the answers that may change because these problems have new winners.

        These are the answers to the problems themselves, and to unmeasured problems around them,
        whose nearest winner may be a different one now.
        """
        exact = set(changed)
        near: dict[str, Neighbourhood[None]] = {}
        for device, problem in exact:
            near.setdefault(device, Neighbourhood()).put(problem, 0, None)

        def affected(answer: Rendered) -> bool:
            if (answer.device, answer.problem) in exact:
                return True
            if answer.match is Match.EXACT:
                return False
            around = near.get(answer.device)
            if around is None:
                return False
            if around.count(answer.problem) > _NEIGHBOURHOODS:
                return True
            return bool(around.nearest(answer.problem, 1, REACH))

        self._drop(affected)

    def drop_packed(self, packs: Collection[str], holding: Mapping[str, str]) -> None:
        """Drop answers whose pack is not among `packs`, or whose kernel `holding` has elsewhere."""

        def affected(answer: Rendered) -> bool:
            if answer.kernel is not None and answer.kernel in holding:
                return answer.pack != holding[answer.kernel]
            return answer.pack is not None and answer.pack not in packs

        self._drop(affected)

    def _get(self, key: Key, accepted: Collection[Match]) -> Rendered | None:
        """The kept answer, which becomes the last used; called under the lock."""
        answer = self._answers.get(key)
        if answer is None or answer.match not in accepted:
            return None
        self._answers.move_to_end(key)
        return answer

    def _drop(self, affected: Callable[[Rendered], bool]) -> None:
        with self._lock:
            self.generation += 1  # first, so that no answer is kept that is being read now
            kept = list(self._answers.items())
        # Without the lock, so that lookups continue meanwhile.
        victims = [(key, answer) for key, answer in kept if affected(answer)]
        with self._lock:
            for key, answer in victims:
                if self._answers.get(key) is answer:
                    del self._answers[key]


def _put(kept: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > limit:
        kept.popitem(last=False)
