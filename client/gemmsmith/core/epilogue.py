"""Epilogues: what a kernel does with a product before it stores it. The list is closed."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Activation(StrEnum):
    """A function that is applied to each element."""

    GELU_TANH = "gelu_tanh"  # x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³)))
    GELU = "gelu"  # x/2 · (1 + erf(x/√2))
    SILU = "silu"  # x / (1 + e⁻ˣ)
    RELU2 = "relu2"  # max(x, 0)²
    RELU = "relu"  # max(x, 0)
    SIGMOID = "sigmoid"  # 1 / (1 + e⁻ˣ)

    @property
    def approximations(self) -> int:
        """How often a kernel needs the GPU's unit for exp, tanh and division for one element."""
        return {"gelu_tanh": 1, "relu2": 0, "relu": 0}.get(self, 2)


class Epilogue(StrEnum):
    """What follows the product P = alpha · A·B (times its factors) within the same kernel.

    Additional inputs: `bias`, [N], added to every row, and `residual` R, [M, N]. Outputs: D and,
    with `_aux`, the argument of the activation, [M, N], which its gradient needs. All have D's
    type, except that the bias of an FP8 D is bf16. D = act(P + bias) + R is computed in FP32 and
    rounded once. A name lists the parts in this order: row factors, bias, activation, gate, column
    factors, residual, aux. With both an activation and a residual, the residual comes before the
    activation: D = act(P + bias + R).

    Column factors s, [N] of D's type, multiply the product and its bias before the residual is
    added (LayerScale of CaiT, ConvNeXt and DINOv2); aux is what they multiply. Row factors r, [M]
    in FP32, multiply the product before the bias (an RMS norm, whose weight is folded into B).

    With a gate (SwiGLU, GeGLU, ReGLU, GLU), P has N = 2·I columns, those of the gate before those
    of up, and D has I columns; aux is P. B's columns are two matrices, each [K, I], which need not
    be adjacent in memory.

    Gradients: dP = dD, times act'(aux) with an activation, or times s or r. The bias's gradient is
    the sum of dP's rows, without r. dR = dD, and ds is the sum of the rows of dD · aux. With a
    gate, d(gate) = dD · up · act'(gate) and d(up) = dD · act(gate).

    Backward epilogues, whose names begin with `d`, follow the input gradient P = dY·W of the layer
    after an activation. They read aux, [M, N], which the forward pass stored, and D is the gradient
    of aux. `_act` also returns the activation's value, [M, N], which the weight gradient of that
    layer needs; `_bgrad` the gradient of the bias before the activation, [N] of D's type: the sum
    of D's rows, added in a fixed order. With `_gate`, aux holds gate and up, [M, 2N], the gate
    first; D holds the gradients of both in the same order, [M, 2N], and the value is act(gate)·up.
    Grouped products have gates only. There row factors r, [M] in FP32, are an operand of every
    gate without being in its name: they multiply D, or backwards D and the value, and the gradient
    of r is an output on demand.
    """

    NONE = "none"  # D = P + beta · C
    BIAS = "bias"  # D = P + bias
    BIAS_GELU_TANH = "bias_gelu_tanh"  # D = gelu_tanh(P + bias)
    BIAS_GELU_TANH_AUX = "bias_gelu_tanh_aux"  # the same D, and aux = P + bias
    BIAS_GELU = "bias_gelu"  # D = gelu(P + bias)
    BIAS_GELU_AUX = "bias_gelu_aux"  # the same D, and aux = P + bias
    BIAS_SILU = "bias_silu"  # D = silu(P + bias)
    BIAS_SILU_AUX = "bias_silu_aux"  # the same D, and aux = P + bias
    BIAS_RELU2 = "bias_relu2"  # D = relu2(P + bias)
    BIAS_RELU2_AUX = "bias_relu2_aux"  # the same D, and aux = P + bias
    RESIDUAL = "residual"  # D = P + R
    BIAS_RESIDUAL = "bias_residual"  # D = P + bias + R
    BIAS_RESIDUAL_RELU = "bias_residual_relu"  # D = relu(P + bias + R): ResNet
    BIAS_RESIDUAL_RELU_AUX = "bias_residual_relu_aux"  # the same D, and aux = P + bias + R
    BIAS_RESIDUAL_SILU = "bias_residual_silu"  # D = silu(P + bias + R)
    BIAS_RESIDUAL_SILU_AUX = "bias_residual_silu_aux"  # the same D, and aux = P + bias + R
    SCALE_RESIDUAL = "scale_residual"  # D = s · P + R: LayerScale
    SCALE_RESIDUAL_AUX = "scale_residual_aux"  # the same D, and aux = P
    BIAS_SCALE_RESIDUAL = "bias_scale_residual"  # D = s · (P + bias) + R
    BIAS_SCALE_RESIDUAL_AUX = "bias_scale_residual_aux"  # the same D, and aux = P + bias
    ROW_SCALE = "row_scale"  # D = r · P: an RMS norm's factor
    ROW_SCALE_BIAS = "row_scale_bias"  # D = r · P + bias
    SILU_GATE = "silu_gate"  # D = silu(P_gate) · P_up: SwiGLU
    SILU_GATE_AUX = "silu_gate_aux"  # the same D, and aux = P
    GELU_TANH_GATE = "gelu_tanh_gate"  # D = gelu_tanh(P_gate) · P_up: GeGLU
    GELU_TANH_GATE_AUX = "gelu_tanh_gate_aux"  # the same D, and aux = P
    GELU_GATE = "gelu_gate"  # D = gelu(P_gate) · P_up
    GELU_GATE_AUX = "gelu_gate_aux"  # the same D, and aux = P
    RELU_GATE = "relu_gate"  # D = relu(P_gate) · P_up: ReGLU
    RELU_GATE_AUX = "relu_gate_aux"  # the same D, and aux = P
    SIGMOID_GATE = "sigmoid_gate"  # D = sigmoid(P_gate) · P_up: GLU
    SIGMOID_GATE_AUX = "sigmoid_gate_aux"  # the same D, and aux = P
    DGELU_TANH = "dgelu_tanh"  # D = P · gelu_tanh'(aux)
    DGELU_TANH_ACT = "dgelu_tanh_act"  # the same D, and gelu_tanh(aux)
    DGELU_TANH_BGRAD = "dgelu_tanh_bgrad"  # the same D, and the sum of its rows
    DGELU = "dgelu"  # D = P · gelu'(aux)
    DGELU_ACT = "dgelu_act"  # the same D, and gelu(aux)
    DGELU_BGRAD = "dgelu_bgrad"  # the same D, and the sum of its rows
    DSILU = "dsilu"  # D = P · silu'(aux)
    DSILU_ACT = "dsilu_act"  # the same D, and silu(aux)
    DSILU_BGRAD = "dsilu_bgrad"  # the same D, and the sum of its rows
    DRELU2 = "drelu2"  # D = P · relu2'(aux)
    DRELU2_ACT = "drelu2_act"  # the same D, and relu2(aux)
    DRELU2_BGRAD = "drelu2_bgrad"  # the same D, and the sum of its rows
    DSILU_GATE = "dsilu_gate"  # D = [P · up · silu'(gate) | P · silu(gate)]
    DSILU_GATE_ACT = "dsilu_gate_act"  # the same D, and silu(gate) · up
    DGELU_TANH_GATE = "dgelu_tanh_gate"  # D = [P · up · gelu_tanh'(gate) | P · gelu_tanh(gate)]
    DGELU_TANH_GATE_ACT = "dgelu_tanh_gate_act"  # the same D, and gelu_tanh(gate) · up
    DGELU_GATE = "dgelu_gate"  # D = [P · up · gelu'(gate) | P · gelu(gate)]
    DGELU_GATE_ACT = "dgelu_gate_act"  # the same D, and gelu(gate) · up
    DRELU_GATE = "drelu_gate"  # D = [P · up · relu'(gate) | P · relu(gate)]
    DRELU_GATE_ACT = "drelu_gate_act"  # the same D, and relu(gate) · up
    DSIGMOID_GATE = "dsigmoid_gate"  # D = [P · up · sigmoid'(gate) | P · sigmoid(gate)]
    DSIGMOID_GATE_ACT = "dsigmoid_gate_act"  # the same D, and sigmoid(gate) · up

    @property
    def steps(self) -> tuple[EpilogueStep, ...]:
        """What a forward epilogue does with P, in order; empty for backward epilogues."""
        return _STEPS[self]

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of what it reads beside A, B and C, in the order of its steps."""
        if self.backward is not None:
            return ("aux",)
        return tuple(
            step.by for step in self.steps if step.kind in (StepKind.MULTIPLY, StepKind.ADD)
        )

    @property
    def results(self) -> tuple[str, ...]:
        """Names of what it writes beside D."""
        if (backward := self.backward) is None:
            return ("aux",) if self.stores_aux else ()
        written = {"activated": backward.activated, "bias_gradient": backward.bias_gradient}
        return tuple(name for name, is_written in written.items() if is_written)

    @property
    def is_torchs(self) -> bool:
        """Whether torch's call of the product computes all of it: nothing follows, or a bias."""
        return self not in _BACKWARD and self.steps in ((), (_ADDED_BIAS,))

    @property
    def has_bias(self) -> bool:
        return _PARTS[self].bias

    @property
    def has_residual(self) -> bool:
        return _PARTS[self].residual

    @property
    def has_column_scale(self) -> bool:
        return _PARTS[self].column_scale

    @property
    def has_row_scale(self) -> bool:
        return _PARTS[self].row_scale

    @property
    def activation(self) -> Activation | None:
        """The activation of a forward epilogue, if it has one."""
        return _PARTS[self].activation

    @property
    def is_gated(self) -> bool:
        """Whether half of P's columns gate the other half. False for backward epilogues."""
        return _PARTS[self].gate

    @property
    def stores_aux(self) -> bool:
        return _PARTS[self].aux

    @property
    def backward(self) -> Backward | None:
        return _BACKWARD.get(self)

    @property
    def reads(self) -> int:
        """Number of M×N matrices that are read in addition to A and B; gate and up are two."""
        return self.backward.halves if self.backward else int(self.has_residual)

    @property
    def sums_rows(self) -> bool:
        """Whether the rows of a gradient are added up, for that of a bias."""
        return self.backward is not None and self.backward.bias_gradient

    @property
    def outputs(self) -> int:
        """Number of M×N matrices that are written."""
        if self.backward is None:
            return 1 + self.stores_aux * (1 + self.is_gated)
        return self.backward.halves + self.backward.activated

    @property
    def matrices(self) -> int:
        """Number of M×N matrices that are read or written in addition to one D."""
        return self.reads + self.outputs - 1

    @classmethod
    def made_of(
        cls,
        *,
        bias: bool = False,
        activation: str | None = None,
        residual: bool = False,
        aux: bool = False,
        gate: bool = False,
        column_scale: bool = False,
        row_scale: bool = False,
    ) -> Epilogue | None:
        """The forward epilogue with these parts; None if it does not exist."""
        return _OF_PARTS.get((row_scale, bias, activation, gate, column_scale, residual, aux))

    @classmethod
    def backward_of(
        cls,
        activation: str,
        *,
        gated: bool = False,
        activated: bool = False,
        bias_gradient: bool = False,
    ) -> Epilogue | None:
        """The backward epilogue with these parts; None if it does not exist."""
        return _OF_BACKWARD.get((activation, gated, activated, bias_gradient))


class StepKind(StrEnum):
    MULTIPLY = "multiply"  # by an operand
    ADD = "add"  # an operand
    STORE = "store"  # the value in an operand, and go on with it
    APPLY = "apply"  # an activation
    GATE = "gate"  # multiply the second half of the columns by an activation of the first half


class EpilogueStep(NamedTuple):
    """A step of a forward epilogue. It takes the value of the step before; the first takes P.

    Attributes:
        by: name of the operand or of the activation.
    """

    kind: StepKind
    by: str


_ADDED_BIAS = EpilogueStep(StepKind.ADD, "bias")


class Backward(NamedTuple):
    """The parts of a backward epilogue.

    Attributes:
        activation: the activation whose derivative is taken.
        gated: whether aux and D hold both gate and up.
        activated: whether the activation's value is an output.
        bias_gradient: whether the sum of D's rows is an output.
    """

    activation: Activation
    gated: bool
    activated: bool
    bias_gradient: bool

    @property
    def halves(self) -> int:
        """Number of [M, N] matrices in aux, and in D."""
        return 2 if self.gated else 1


class _Parts(NamedTuple):
    row_scale: bool
    bias: bool
    activation: Activation | None
    gate: bool
    column_scale: bool
    residual: bool
    aux: bool


def _backward(epilogue: Epilogue) -> Backward:
    """Parses the name of a backward epilogue."""
    rest = epilogue.value.removeprefix("d")
    activated, bias_gradient = rest.endswith("_act"), rest.endswith("_bgrad")
    rest = rest.removesuffix("_act").removesuffix("_bgrad")
    return Backward(
        activation=Activation(rest.removesuffix("_gate")),
        gated=rest.endswith("_gate"),
        activated=activated,
        bias_gradient=bias_gradient,
    )


def _parts(epilogue: Epilogue) -> _Parts:
    """Parses the name of a forward epilogue. Backward epilogues have none of these parts."""
    name = "" if epilogue in _BACKWARD else epilogue.value
    rest = name.removeprefix("row_scale").removeprefix("_").removesuffix("_aux")
    activation = rest.removeprefix("bias_").removeprefix("residual_").removesuffix("_gate")
    return _Parts(
        row_scale=name.startswith("row_scale"),
        bias=rest.startswith("bias"),
        activation=Activation(activation) if activation in list(Activation) else None,
        gate=rest.endswith("_gate"),
        column_scale=rest.endswith("scale_residual"),
        residual="residual" in rest,
        aux=name.endswith("_aux"),
    )


def _steps(parts: _Parts) -> tuple[EpilogueStep, ...]:
    """The order in which a name lists the parts; what aux stores is the activation's argument."""
    residual_first = parts.activation is not None
    listed = (
        (parts.row_scale, StepKind.MULTIPLY, "row_scale"),
        (parts.bias, StepKind.ADD, "bias"),
        (parts.residual and residual_first, StepKind.ADD, "residual"),
        (parts.aux, StepKind.STORE, "aux"),
        (parts.activation, StepKind.GATE if parts.gate else StepKind.APPLY, parts.activation or ""),
        (parts.column_scale, StepKind.MULTIPLY, "column_scale"),
        (parts.residual and not residual_first, StepKind.ADD, "residual"),
    )
    return tuple(EpilogueStep(kind, by) for is_part, kind, by in listed if is_part)


_BACKWARD = {
    epilogue: _backward(epilogue) for epilogue in Epilogue if epilogue.value.startswith("d")
}
_OF_BACKWARD: dict[tuple[object, ...], Epilogue] = {
    parts: epilogue for epilogue, parts in _BACKWARD.items()
}
_PARTS = {epilogue: _parts(epilogue) for epilogue in Epilogue}
_STEPS = {epilogue: _steps(parts) for epilogue, parts in _PARTS.items()}
_OF_PARTS: dict[tuple[object, ...], Epilogue] = {
    parts: epilogue for epilogue, parts in _PARTS.items() if epilogue not in _BACKWARD
}

GATES = tuple(
    epilogue.activation.value
    for epilogue in Epilogue
    if epilogue.is_gated and epilogue.activation is not None and not epilogue.stores_aux
)
"""Names of the activations that gates may have."""
