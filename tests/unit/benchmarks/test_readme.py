"""What README and docs/benchmarks.md claim is what the files say, and the picture shows it."""

from __future__ import annotations

import re
from collections import Counter

import msgspec
import pytest

from benchmarks.peers.records import Report
from benchmarks.readme import beside, regimes
from benchmarks.readme.__main__ import blocks, put
from benchmarks.readme.kinds import FEW_TOKENS, KINDS, PLAIN, kind_of, table
from benchmarks.readme.picture import COLOURS, FILE, columns
from benchmarks.readme.shipped import RESULTS, averages, got, shipped, short
from gemmsmith.core.config import Use
from service.report.problem_rows import unaligned_operands

WINNERS = shipped()


def test_pages_have_the_blocks_that_the_files_give() -> None:
    for page, found in blocks().items():
        text = page.read_text(encoding="utf-8")
        for name, block in found.items():
            assert put(text, name, block) == text, f"{page.name}, {name}: run `make figures`"


def test_every_mean_has_its_median_beside_it() -> None:
    means = re.compile(r"\d\.\d{3} ×(?! · \d\.\d{3})")
    pages = [block for found in blocks().values() for name, block in found.items()]
    assert sum(block.count(" × · ") for block in pages) > 100
    for block in pages:
        assert means.search(block) is None


def test_peers_are_compared_by_the_rule_of_the_first_table() -> None:
    """What has a reason of its own to gain is in its own row there, and not in the comparison."""
    report = msgspec.json.decode((RESULTS / beside.FILE).read_bytes(), type=Report)
    plain = [row.problem for row in report.rows if kind_of(row.problem) is PLAIN]
    assert 0 < len(plain) < len(report.rows)
    assert all(problem.m > FEW_TOKENS and not unaligned_operands(problem) for problem in plain)
    shipped = [got(w) for w in WINNERS if w.problem in plain and short(w.device) == "H200"]
    said = beside.table(WINNERS)
    assert f"{len(plain)} problems" in said
    assert f"{len(shipped)} of these problems gain {averages(shipped)}" in said


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no markers <!-- gains -->"):
        put("# A page", "gains", "| |")


def test_every_winner_is_drawn_once_and_none_is_below_what_torch_does() -> None:
    drawn = [winner for column in columns(WINNERS) for winner in column.winners]
    assert Counter(str(w.problem) + w.device.slug for w in drawn) == Counter(
        str(w.problem) + w.device.slug for w in WINNERS
    )
    # Where an order of sums is demanded, torch's default cannot take the winner's place.
    assert min(got(w) for w in drawn if w.problem.operation.summation is None) >= 1.0


def test_what_is_not_served_is_drawn_as_the_default() -> None:
    ahead = [w for w in WINNERS if w.use.is_default and w.speedup and w.speedup.ci_low > 1]
    assert ahead, "some kernels that are ahead are not served: the picture once hid that"
    assert {got(w) for w in ahead} == {1.0}


def test_the_picture_has_a_dot_of_its_colour_for_each_use() -> None:
    svg = FILE.read_text(encoding="utf-8")
    uses = Counter(w.use for w in WINNERS)
    assert set(uses) == set(COLOURS) == set(Use) - {Use.PLUGIN}  # a plugin ships its own
    for use, colour in COLOURS.items():
        dots = sum(1 for line in svg.splitlines() if "<use " in line and colour in line)
        assert dots == uses[use] + 1, use  # and one in the legend


def test_the_three_regimes_are_shown_by_what_they_decide() -> None:
    served, behind, hungry = regimes.examples(WINNERS).values()
    assert not served.use.is_default
    assert min(regimes.gains(served)) > 1
    assert behind.use.is_default
    assert min(regimes.gains(behind)) < 1 < max(regimes.gains(behind))
    assert hungry.use.is_default
    assert 1 < min(regimes.gains(hungry)) <= regimes.mean(hungry) < (hungry.power_penalty or 0)
    assert regimes.FILE.read_text(encoding="utf-8").startswith("<?xml")


def test_kinds_without_winners_are_said_to_be_unmeasured() -> None:
    said = table(WINNERS)
    for kind in KINDS:
        mine = [w for w in WINNERS if kind_of(w.problem) is kind]
        assert (f"| {kind.title} |" in said) == bool(mine), kind.title
        if not mine:
            assert kind.title in said.partition("Not measured yet: ")[2]
