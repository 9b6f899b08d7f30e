"""docs/compatibility.md: what works names tests, and those exist."""

from __future__ import annotations

import re

import pytest

from tests.support.docs import ROOT

PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
ROWS = {
    name: (state, reason)
    for name, state, reason in re.findall(
        r"^\| (\S.*?) \| (\S.*?) \| (.*?) \|$", PAGE, re.MULTILINE
    )
    if state != "state"
}
ASKED = (
    "PEFT (LoRA)", "QLoRA", "TRL", "Axolotl", "Liger", "FlashAttention", "torchao",
    "Transformer Engine", "DeepSpeed", "Megatron", "FSDP2", "DDP", "vLLM", "SGLang",
    "TensorRT-LLM", "A100", "B200",
)  # fmt: skip
"""What people ask about."""


def test_every_question_has_its_row() -> None:
    assert set(ASKED) <= set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_what_is_proved(name: str) -> None:
    state, reason = ROWS[name]
    assert state in {"works", "not tried", "no"}
    assert reason
    if state == "works":
        assert "`tests/" in reason or reason.startswith("the same test")


@pytest.mark.parametrize("test", sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE))))
def test_a_named_test_exists(test: str) -> None:
    path, _, function = test.partition("::")
    assert (ROOT / path).exists()
    if function:
        assert f"\ndef {function}(" in (ROOT / path).read_text(encoding="utf-8")
