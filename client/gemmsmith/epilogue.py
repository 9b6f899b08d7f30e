"""What a kernel does with a product before it stores it: a closed, named list."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Activation(StrEnum):
    """A function of each element."""

    GELU_TANH = "gelu_tanh"  # x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³)))
    GELU = "gelu"  # x/2 · (1 + erf(x/√2))
    SILU = "silu"  # x / (1 + e⁻ˣ)
    RELU2 = "relu2"  # max(x, 0)²


class Epilogue(StrEnum):
    """What follows the product P = alpha · A·B (times its factors) within the same kernel.

    Inputs beside A and B: `bias`, [N], added to every row, and `residual` R, [M, N]. Outputs: D,
    and with `_aux` what the activation is applied to, [M, N], which its gradient needs. All have
    D's type, and D = act(P + bias) + R is computed in FP32 and rounded once. A name says what there
    is, in this order: bias, activation, gate, residual, aux.

    Of gated ones (SwiGLU, GeGLU) P has N = 2·I columns, the gate's before up's, and D has I; aux is
    P. B's columns are two matrices, each [K, I], which need not lie side by side in memory.

    The gradient of P is that of D, times act'(aux) where there is an activation; that of the bias
    is the sum of its rows, that of R is D's. Of a gated D the gate's is that of D times up times
    act'(gate), up's that of D times act(gate).
    """

    NONE = "none"  # D = P + beta · C
    BIAS = "bias"  # D = P + bias
    BIAS_GELU_TANH = "bias_gelu_tanh"  # D = gelu_tanh(P + bias)
    BIAS_GELU_TANH_AUX = "bias_gelu_tanh_aux"  # likewise, and aux = P + bias
    BIAS_GELU = "bias_gelu"  # D = gelu(P + bias)
    BIAS_GELU_AUX = "bias_gelu_aux"  # likewise, and aux = P + bias
    BIAS_SILU = "bias_silu"  # D = silu(P + bias)
    BIAS_SILU_AUX = "bias_silu_aux"  # likewise, and aux = P + bias
    BIAS_RELU2 = "bias_relu2"  # D = relu2(P + bias)
    BIAS_RELU2_AUX = "bias_relu2_aux"  # likewise, and aux = P + bias
    RESIDUAL = "residual"  # D = P + R
    BIAS_RESIDUAL = "bias_residual"  # D = P + bias + R
    SILU_GATE = "silu_gate"  # D = silu(P_gate) · P_up: SwiGLU
    SILU_GATE_AUX = "silu_gate_aux"  # likewise, and aux = P
    GELU_TANH_GATE = "gelu_tanh_gate"  # D = gelu_tanh(P_gate) · P_up: GeGLU
    GELU_TANH_GATE_AUX = "gelu_tanh_gate_aux"  # likewise, and aux = P
    GELU_GATE = "gelu_gate"  # D = gelu(P_gate) · P_up
    GELU_GATE_AUX = "gelu_gate_aux"  # likewise, and aux = P

    @property
    def has_bias(self) -> bool:
        """Whether an element for each column is added."""
        return _PARTS[self].bias

    @property
    def has_residual(self) -> bool:
        """Whether a matrix of D's size is added."""
        return _PARTS[self].residual

    @property
    def activation(self) -> Activation | None:
        """What is applied to the product and its bias."""
        return _PARTS[self].activation

    @property
    def is_gated(self) -> bool:
        """Whether half of the product's columns gate the other half."""
        return _PARTS[self].gate

    @property
    def stores_aux(self) -> bool:
        """Whether what the activation is applied to is stored as well; of gated ones P whole."""
        return _PARTS[self].aux

    @property
    def matrices(self) -> int:
        """How many matrices of D's size are read or written beside D."""
        return self.has_residual + self.stores_aux * (1 + self.is_gated)

    @classmethod
    def made_of(
        cls,
        *,
        bias: bool = False,
        activation: str | None = None,
        residual: bool = False,
        aux: bool = False,
        gate: bool = False,
    ) -> Epilogue | None:
        """The one with these parts; None where there is none such."""
        return _OF_PARTS.get((bias, activation, gate, residual, aux))


class _Parts(NamedTuple):
    bias: bool
    activation: Activation | None
    gate: bool
    residual: bool
    aux: bool


def _parts(epilogue: Epilogue) -> _Parts:
    """What its name says."""
    activation = epilogue.value.removeprefix("bias_").removesuffix("_aux")
    gate = activation.endswith("_gate")
    activation = activation.removesuffix("_gate")
    return _Parts(
        bias=epilogue.value.startswith("bias"),
        activation=Activation(activation) if activation in list(Activation) else None,
        gate=gate,
        residual=epilogue.value.endswith("residual"),
        aux=epilogue.value.endswith("_aux"),
    )


_PARTS = {epilogue: _parts(epilogue) for epilogue in Epilogue}
_OF_PARTS: dict[tuple[object, ...], Epilogue] = {
    parts: epilogue for epilogue, parts in _PARTS.items()
}

GATES = tuple(
    one.activation.value
    for one in Epilogue
    if one.is_gated and one.activation is not None and not one.stores_aux
)
"""The activations of gates."""
