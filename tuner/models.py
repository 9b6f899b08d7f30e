"""The matrix products of a whole model at a number of tokens: forward and both gradients.

A model is one of the shipped suites' (`llama-3-8b`), or a transformers `config.json`. Query, key
and value count as one product, and so do gate and up, as in the suites. Of a suite's model every
layer counts once; a configuration says how many layers there are.

Tokens of experts are those that are routed to all of them: with `num_experts_per_tok` = 8, eight
times the tokens. A suite does not say how many that is, so its tokens are the routed ones.
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmsmith.core.operation import Grouping, Layout, Operation
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.files import read_text
from tuner.suites import Pass, Stored, SuiteError, shipped

_GATED = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2"),
        *(
            "gemma3",
            "gemma3_text",
            "phi3",
            "olmo",
            "olmo2",
            "olmoe",
            "cohere",
            "granite",
            "smollm3",
        ),
    }
)
"""`model_type`s whose feed-forward layer is down(act(gate(x)) · up(x))."""
_SINGLE = frozenset({"invariant"})
"""Suites in which query, key, value, gate and up are products of their own."""
_HEADLESS = frozenset({"bert", "roberta", "vit"})
_PLAIN = frozenset({"gpt_neox", "phi", "starcoder2", *_HEADLESS})
"""`model_type`s whose feed-forward layer is two linear layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A linear layer, or a layer of `groups` experts, that a model has `count` times.

    Attributes:
        out, inner: features.
        routed: how many experts a token goes to; 1 for a linear layer.
    """

    name: str
    out: int
    inner: int
    count: int = 1
    groups: int | None = None
    routed: int = 1
    stored: Stored = Stored.OUT_IN


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProduct:
    """One product of a model, and how often a step runs it."""

    layer: str
    which: Pass
    problem: Problem
    count: int


def of_suites(name: str) -> list[Layer]:
    """The layers of a model of the shipped suites.

    Raises:
        SuiteError: there is no such model; lists the known ones.
    """
    known = by_model()
    if name not in known:
        near = [model for model in known if name.lower() in model]
        raise SuiteError(
            f"no model {name!r:.80}: choose one of {', '.join(near or known)}, or pass --config "
            "with its config.json"
        )
    return list(known[name])


@functools.cache
def by_model() -> dict[str, tuple[Layer, ...]]:
    """The models of the shipped suites, by name in order, with each layer once.

    Without `_SINGLE`: with these, a model's products would be counted twice.
    """
    models: dict[str, dict[tuple[Any, ...], Layer]] = {}
    for path in sorted(shipped().glob("*.toml")):
        layers = [] if path.stem in _SINGLE else tomllib.loads(read_text(path)).get("layer", [])
        for entry in layers:
            layer = Layer(
                name=entry["name"],
                out=entry["out"],
                inner=entry["in"],
                groups=entry.get("groups"),
                stored=Stored(entry.get("weight", Stored.OUT_IN)),
            )
            key = (layer.out, layer.inner, layer.groups, layer.stored)
            models.setdefault(entry["model"], {}).setdefault(key, layer)
    return {name: tuple(models[name].values()) for name in sorted(models)}


def of_config(path: Path) -> list[Layer]:
    """The layers of a transformers configuration.

    Raises:
        SuiteError: the file cannot be read, or its `model_type` is not known.
    """
    try:
        config = json.loads(read_text(path))
        config = config.get("text_config", config)
        return list(_layers(config))
    except FileNotFoundError:
        raise SuiteError(f"no file {path}") from None
    except KeyError as error:
        raise SuiteError(f"{path} lacks {error}, which its layers' sizes need") from None
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise SuiteError(f"{path} is not a model's config.json: {error}") from None


def _layers(config: Mapping[str, Any]) -> Iterator[Layer]:
    kind = config["model_type"]
    if kind == "gpt2":
        yield from _gpt2(config)
        return
    if kind not in _GATED | _PLAIN:
        known = ", ".join(sorted({"gpt2", *_GATED, *_PLAIN}))
        raise ValueError(f"model_type {kind!r:.40} is not known; known are {known}")
    hidden, count, heads = (
        int(config[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    width = int(config.get("head_dim") or hidden // heads)
    pairs = int(config.get("num_key_value_heads") or heads)
    yield Layer(name="qkv", out=(heads + 2 * pairs) * width, inner=hidden, count=count)
    yield Layer(name="attention_out", out=hidden, inner=heads * width, count=count)
    experts = config.get("num_experts") or config.get("num_local_experts")
    inner = int((experts and config.get("moe_intermediate_size")) or config["intermediate_size"])
    first = "gate_up" if kind in _GATED else "up"
    groups = int(experts) if experts else None
    routed = int(config["num_experts_per_tok"]) if experts else 1
    for name, out, width in (
        (first, inner * (2 if kind in _GATED else 1), hidden),
        ("down", hidden, inner),
    ):
        yield Layer(name=name, out=out, inner=width, count=count, groups=groups, routed=routed)
    if kind not in _HEADLESS:
        yield Layer(name="lm_head", out=int(config["vocab_size"]), inner=hidden)


def _gpt2(config: Mapping[str, Any]) -> Iterator[Layer]:
    hidden, count = int(config["n_embd"]), int(config["n_layer"])
    inner = int(config.get("n_inner") or 4 * hidden)
    for name, out, width in (
        ("qkv", 3 * hidden, hidden),
        ("attention_out", hidden, hidden),
        ("up", inner, hidden),
        ("down", hidden, inner),
    ):
        yield Layer(name=name, out=out, inner=width, count=count, stored=Stored.IN_OUT)
    yield Layer(name="lm_head", out=int(config["vocab_size"]), inner=hidden)


def products(layers: list[Layer], tokens: int, dtype: str) -> list[LayerProduct]:
    """Every product of the layers that the element type has.

    Raises:
        InvalidProblem: there is no such type, or `tokens` is out of range.
    """
    made = []
    for layer in layers:
        for which in Pass:
            problem = _problem(layer, which, tokens * layer.routed, dtype)
            if problem is not None:
                made.append(
                    LayerProduct(layer=layer.name, which=which, problem=problem, count=layer.count)
                )
    return made


def _problem(layer: Layer, which: Pass, tokens: int, dtype: str) -> Problem | None:
    """The product of one pass; None if the element type has no such operation."""
    swapped = layer.stored is Stored.IN_OUT
    m, n, k, layout = {
        Pass.FORWARD: (tokens, layer.out, layer.inner, Layout.TT if swapped else Layout.TN),
        Pass.INPUT_GRADIENT: (tokens, layer.inner, layer.out, Layout.TN if swapped else Layout.TT),
        Pass.WEIGHT_GRADIENT: (layer.out, layer.inner, tokens, Layout.NT),
    }[which]
    if which is Pass.WEIGHT_GRADIENT and swapped:
        m, n = n, m
    grouping = None
    if layer.groups is not None:
        grouping = Grouping.DEPTH if which is Pass.WEIGHT_GRADIENT else Grouping.ROWS
    try:
        operation = Operation.of(dtype, layout, grouping=grouping)
    except InvalidProblem as error:
        if error.field == "dtype":
            raise
        return None
    return Problem.of(operation, m, n, k, layer.groups or 1)
