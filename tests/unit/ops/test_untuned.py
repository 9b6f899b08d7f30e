"""A size without a winner is named in the log: once, with its command, and few of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gemmsmith
from gemmsmith import Snapshot
from gemmsmith.answers.snapshot import Row
from gemmsmith.core.config import Use
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.ops.engine import untuned
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.untuned import Untuned
from gemmsmith.winners.lookup import Lookup
from tests.support.serving import own_signer
from tests.support.stand_in import Host, Packs, config, installed

TUNED = Problem(m=4, n=8, k=16)
DEFAULT = Problem(m=8, n=8, k=16)
ROWS = (
    Row(problem=TUNED, use=Use.CUTLASS, config=config("tn", DType.BF16, Layout.TN)),
    Row(problem=DEFAULT, use=Use.CUBLAS),
)
Product = Callable[[int, int, int], None]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Untuned, "named", set())
    monkeypatch.delenv("GEMMSMITH_CAPTURE", raising=False)
    monkeypatch.delenv("RANK", raising=False)


def engine(pack: Path, host: Host, *rows: Row, url: str | None = None) -> Engine:
    snapshot = Snapshot.of("host-4sm", rows, own_signer())
    return Engine(Lookup(snapshot, pin=True, url=url), Packs(pack), platform=host)


def product(m: int, n: int, k: int) -> None:
    gemmsmith.linear(torch.ones(m, k).bfloat16(), torch.ones(n, k).bfloat16())


def test_a_size_is_named_once_with_its_command(
    pack: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    for url, option in ((None, ""), ("http://x:8000", " --url http://x:8000")):
        Untuned.named.clear()
        caplog.clear()
        for _ in range(2):  # another engine of the same process says nothing new
            with installed(engine(pack, host, *ROWS, url=url)):
                for m in (16, 16, 4, 8):
                    product(m, 8, 16)
        assert caplog.messages == [
            "no winner for 16×8×16 bf16 tn: torch runs it, which may be slower. Tune it: "
            f"gemmsmith tune 16 8 16 --dtype bf16 --layout tn{option}"
        ]


def test_few_are_named_and_the_last_says_so(
    pack: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    with installed(engine(pack, host, *ROWS)):
        for m in range(16, 48):
            product(m, 8, 16)
    assert len(caplog.messages) == untuned.MOST
    assert ["not named" in message for message in caplog.messages] == [False, False, True]
    assert caplog.messages[-1].endswith("`gemmsmith run --tune -- COMMAND` tunes a program")


def test_what_is_small_beside_other_products_is_not_named(
    pack: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    with installed(engine(pack, host, *ROWS)):
        product(64, 64, 64)
        product(8, 8, 8)
        product(64, 64, 32)
    assert [message.split()[3] for message in caplog.messages] == ["64×64×64", "64×64×32"]


@pytest.mark.parametrize("case", ["no winners", "captured", "another rank", "other types"])
def test_nothing_is_said(
    pack: Path,
    host: Host,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    if case == "captured":
        monkeypatch.setenv("GEMMSMITH_CAPTURE", "folder")
    if case == "another rank":
        monkeypatch.setenv("RANK", "1")
    with installed(engine(pack, host, *(() if case == "no winners" else ROWS))):
        if case == "other types":
            double = torch.ones(16, 16, dtype=torch.float64)
            gemmsmith.linear(double, double)
        else:
            product(16, 8, 16)
    assert caplog.messages == []


def test_a_fused_product_without_a_winner_is_its_plain_product(
    pack: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(4, 16).bfloat16()
    with installed(engine(pack, host, *ROWS)):
        weight = torch.ones(8, 16).bfloat16()
        gemmsmith.gated_linear(x, weight, weight, activation="silu")
    assert caplog.messages == []
