"""What models do to logits before their loss, as factors of the head's operands."""

from __future__ import annotations

import math

import torch


class LogitScaling:
    """A scale and a softcap, noted in the order in which a program applies them to logits.

    `tanh(logits / c) * c` is a softcap. Each method returns whether the operands can follow.
    """

    def __init__(self) -> None:
        self._factor = self._divisor = self._cap = 1.0
        self._is_capped = False

    def tanh(self) -> bool:
        is_first, self._is_capped = not self._is_capped, True
        return is_first

    def multiply(self, number: float) -> bool:
        if not self._is_capped:
            self._factor *= number
            return True
        is_first, self._cap = self._cap == 1, number
        return is_first

    def divide(self, number: float) -> bool:
        if not self._is_capped:
            self._divisor *= number
        return not self._is_capped

    def of_operands(self, dtype: torch.dtype) -> tuple[float, float | None] | None:
        """What x and the bias are multiplied by, and the softcap, or None without one.

        Returns None if the result would round otherwise: only a power of two can be multiplied in
        before the product, in a type with the exponents of FP32.
        """
        cap = self._cap
        if self._divisor == 0 or cap <= 0 or not math.isfinite(self._factor * cap / self._divisor):
            return None
        scale = self._factor * cap / self._divisor
        if scale != 1 and (abs(math.frexp(scale)[0]) != 0.5 or dtype is not torch.bfloat16):
            return None
        return scale, cap if self._is_capped else None
