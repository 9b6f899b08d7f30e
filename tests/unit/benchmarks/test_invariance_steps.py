"""benchmarks/invariance's models without a GPU: stand-in kernels, tiny models."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import gemmsmith
from benchmarks.invariance import logits, steps
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine import source
from gemmsmith.ops.engine.engine import Engine
from tests.support import stand_in
from tests.support.stand_in import Chooser, Host, Packs


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in.build(tmp_path_factory.mktemp("pack"))


@pytest.fixture(autouse=True)
def _on_host() -> Iterator[None]:
    """`gemmsmith.use` makes engines of the host."""
    host = Host()
    host.kind = "cpu"
    Dispatch.of("cpu", stream=host.stream)

    def engine(*words: object, **options: object) -> Engine:
        return Engine(*words, platform=host, **options)  # type: ignore[arg-type]

    with mock.patch.object(source, "Engine", engine):
        yield
    gemmsmith.use(None)


@pytest.fixture
def winners(pack: Path) -> tuple[Chooser, Packs]:
    return Chooser(answers=lambda problem: not problem.operation.is_fused), Packs(pack)


def options(winners: object, output: Path, **others: object) -> argparse.Namespace:
    known = {"device": "cpu", "tiny": True, "winners": winners, "plain": winners}
    return argparse.Namespace(**known | {"output": output} | others)


def test_steps_are_compared_on_three_sides(winners: tuple[Chooser, Packs], tmp_path: Path) -> None:
    chosen = options(winners, tmp_path / "steps.json")
    row = steps.decode(chosen)
    asked = {problem.dtype for problem in winners[0].asked}
    assert {"bf16", "bf16.sum_sequential"} <= asked
    assert set(row["ms"]) == {"torch", "gemmsmith", "invariant", "again"}
    products = {
        "torch over invariant", "gemmsmith over invariant", "torch over gemmsmith",
        "torch over again",
    }  # fmt: skip
    assert set(row["ratios"]) == products
    winners[0].asked.clear()
    assert set(steps.training(chosen)["ratios"]) == products | {
        "torch over invariant fused", "gemmsmith over invariant fused",
        "torch over gemmsmith fused", "gemmsmith fused over invariant fused",
    }  # fmt: skip
    demanded = {(p.dtype, str(p.layout)) for p in winners[0].asked if "sum" in p.dtype}
    assert {("bf16.sum_sequential", layout) for layout in ("tn", "tt", "nt")} <= demanded


def test_a_step_without_winners_of_the_order_raises(pack: Path, tmp_path: Path) -> None:
    plain = Chooser(answers=lambda problem: problem.dtype == "bf16"), Packs(pack)
    with pytest.raises(RuntimeError, match="numerics='invariant'"):
        steps.decode(options(plain, tmp_path / "steps.json"))


def test_a_decoding_step_reads_the_whole_cache() -> None:
    variant = steps.hugging.Variant(tiny=True)
    model, _ = steps.hugging.built("decode", "cpu", variant)
    step = steps.decoding(model, rows=3, length=8, device="cpu")
    first, second = step(), step()
    assert isinstance(first, torch.Tensor)
    assert first.shape == (3, 1, model.config.vocab_size)
    assert torch.equal(first, torch.as_tensor(second))


def test_logits_of_a_prompt_do_not_depend_on_the_batch(
    winners: tuple[Chooser, Packs], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for rows in (1, 5):
        chosen = options(winners, tmp_path / f"{rows}.json", rows=rows, layers=2)
        model, tokens = logits.made(chosen)
        hashes = {
            side: logits.hashed(logits.computed(side, model, tokens, chosen))
            for side in logits.SIDES
        }
        files.append(chosen.output)
        chosen.output.write_text(json.dumps({"rows": rows, "hashes": hashes}))
    assert any("sum" in problem.dtype for problem in winners[0].asked)
    assert logits.main(["--same", *map(str, files)]) == 0
    assert "invariant: logits in batches of 1, 5 are equal to the bit" in capsys.readouterr().out
    files[0].write_text(json.dumps({"rows": 1, "hashes": dict.fromkeys(logits.SIDES, "x")}))
    assert logits.main(["--same", *map(str, files)]) == 1


def test_attention_of_one_sequence_at_a_time_is_torchs() -> None:
    query, key, value = torch.randn(3, 4, 6, 8), torch.randn(3, 2, 6, 8), torch.randn(3, 2, 6, 8)
    ours, _ = logits.one_by_one(None, query, key, value, None, scaling=0.5, dropout=0.0)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.5, enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs.transpose(1, 2))
