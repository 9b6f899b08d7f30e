"""A capture changes neither whether a program runs nor what it computes or can see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

import gemmsmith
from gemmsmith.program import calls
from tests.support.observable import PROGRAMS

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of what is old or new in it


def same(found: Any, expected: Any) -> None:
    """Raises AssertionError unless all bits are equal."""
    leaves, wanted = tree_flatten(found), tree_flatten(expected)
    assert leaves[1] == wanted[1]
    for one, other in zip(leaves[0], wanted[0], strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_without_it(name: str) -> None:
    program = PROGRAMS[name]
    expected = program()
    with gemmsmith.capture() as shapes:
        found = program()
    same(found, expected)
    # Products of tensors without data and of other processes do not count.
    assert name in ("meta", "loader") or shapes.problems or shapes.skipped or shapes.unseen
    assert not calls._Hooks.libraries
