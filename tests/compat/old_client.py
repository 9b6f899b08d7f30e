"""What a program that still has release 0.1 of the client does; run with that on its path.

Prints one JSON document: what each call gave, or the exception that it raised.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import gemmsmith
from gemmsmith import AsyncClient, Client, DType, Layout, Lookup, NotTuned, Problem


def told(answer: Any) -> dict[str, Any]:
    if isinstance(answer, NotTuned):
        return {"not_tuned": answer.status}
    return {
        "use": str(answer.use),
        "kernel": answer.config and answer.config.kernel.name,
        "revision": answer.revision,
        "match": str(answer.match),
    }


def main(url: str) -> None:
    known = Problem(m=256, n=4096, k=4096)
    theirs = Problem(m=512, n=4096, k=4096)
    fp16 = Problem(m=512, n=2048, k=1024, batch=4, dtype=DType.FP16, layout=Layout.NT)
    found: dict[str, Any] = {"file": gemmsmith.__file__, "version": gemmsmith.__version__}
    with Client(url, cache_dir=None) as client:
        found["best"] = told(client.best(256, 4096, 4096))
        found["again"] = told(client.best(256, 4096, 4096))
        found["other backend"] = told(client.best(512, 4096, 4096))
        found["near other backend"] = told(client.best(600, 4096, 4096))
        found["batch"] = [told(item) for item in client.best_many([known, theirs, fp16])]
        snapshot = client.snapshot()
        found["snapshot"] = [[str(row.problem), str(row.use)] for row in snapshot.rows]
        found["unchanged"] = client.snapshot(known=snapshot) is snapshot
        lookup = Lookup(snapshot)
        for name, problem in {"lookup": known, "lookup other backend": theirs}.items():
            sizes = (problem.m, problem.n, problem.k)
            choice = lookup.lookup(problem.dtype, problem.layout, *sizes)
            found[name] = choice and choice.config.kernel.name
        found["devices"] = [device.slug for device in client.devices()]
        found["jobs"] = sorted(str(status.problem) for status in client.jobs())
        found["history"] = [
            [str(entry.origin), told(entry.answer)] for entry in client.history(theirs)
        ]
        found["results"] = [row["problem"]["dtype"] for row in client.results()]
        job = client.tune(77, 4096, 4096, effort="quick")
        found["tuned"] = told(job.wait(timeout=60))
        found["events"] = [event.kind for event in job.events()]
    found["async"] = told(asyncio.run(asked_async(url)))
    print(json.dumps(found))


async def asked_async(url: str) -> Any:
    async with AsyncClient(url, cache_dir=None) as client:
        return await client.best(512, 4096, 4096)


if __name__ == "__main__":
    main(sys.argv[1])
