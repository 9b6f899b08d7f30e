"""The families of the overview: few, for people, and with every operation in one of them."""

from __future__ import annotations

import re
from collections import Counter

from service.report.glance import families
from tests.support.shipped import shipped_files
from tuner.exchange import read_winners
from tuner.store.overview import Standing


def test_a_dozen_families_hold_every_operation() -> None:
    winners = [winner for file in shipped_files() for winner in read_winners(file)]
    standings = [
        Standing(device=slug, dtype=dtype, problems=count, ahead=1, saved=0.5, most=2.0)
        for (slug, dtype), count in Counter(
            (winner.device.slug, winner.problem.dtype) for winner in winners
        ).items()
    ]
    summed = families(standings)
    assert len(summed) <= 15
    dtypes = [dtype for family in summed for dtype in family.dtypes]
    assert sorted(dtypes) == sorted({item.dtype for item in standings})
    sums = [total for family in summed for total in family.sums.values()]
    assert sum(total.problems for total in sums) == len(winners)
    assert {total.saved for total in sums} == {0.5}
    assert all(re.fullmatch(r"[A-Za-z0-9', ]+", family.name) for family in summed)
