"""`gemmsmith explain`: why the fastest known kernel of a problem is the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.best import answering
from service.cli.options import (
    DeviceSlug,
    Packs,
    ProblemOptions,
    SourceOptions,
    load_settings,
    typed,
)
from service.cli.output import (
    CommandError,
    MisuseError,
    Result,
    microseconds,
    ratio,
    say,
    table,
)
from service.cli.session import connect, model_of

if TYPE_CHECKING:
    from service.cli.measuring import MeasuredAdvice
    from tuner.explain import Explanation


def explain(
    shape: ProblemOptions,
    device: DeviceSlug = None,
    packs: Packs = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure predicted advice on this machine's GPU with what is compiled.",
        ),
    ] = False,
    *,
    source: SourceOptions,
) -> Result:
    """Say why the winner of M N K is fastest: tiles, waves, occupancy, limits, energy, time.

    The winner and the default are side by side. Figures follow from what was recorded; estimates
    are named so. Advice is measured on tuned neighbours, or predicted.
    """
    problem = shape.problem
    if source.url:
        if measure:
            raise MisuseError("--measure uses this machine's GPU: leave --url out")
        with connect(source.url) as client:
            document = client.explain(problem, device=device)
        return Result(document, lambda: _show(read_explanation(document)))
    from msgspec import to_builtins

    from service import documents
    from service.cli.measuring import measured
    from service.explaining import explanation_of
    from tuner.compile import ArtifactStore

    settings = load_settings(database=source.database, packs=packs)
    with answering(settings, source.database) as store:
        model = model_of(settings, device, store)
        winner = store.winner(problem, model.slug)
        item, near = None, []
        if winner is None:
            near = store.near_winners(problem, model.slug, limit=1)
        else:
            item = explanation_of(winner, store, ArtifactStore(settings.packs))
    if item is None:
        nearest = ""
        if near:
            nearest = f". Or explain the nearest: gemmsmith explain {typed(near[0].problem)}"
        raise CommandError(
            f"{problem} was not tuned on {model.name}. Tune it: gemmsmith tune {typed(problem)}"
            f"{nearest}"
        )
    document = documents.explanation(item)
    if not measure:
        return Result(document, lambda: _show(item))
    rows = list(measured(item, settings))
    document["measured"] = to_builtins(rows)
    return Result(document, lambda: _show(item, rows))


def read_explanation(document: dict[str, Any]) -> Explanation:
    """The explanation that a service sent.

    Raises:
        CommandError: it has another form, of another version.
    """
    import msgspec

    from tuner.explain import Explanation

    try:
        return msgspec.convert(document, Explanation)
    except msgspec.ValidationError as error:
        raise CommandError(
            f"the service's explanation cannot be read ({error}): upgrade the older of the two, or "
            "print it with --json"
        ) from None


def _show(item: Explanation, rows: Sequence[MeasuredAdvice] | None = None) -> None:
    """Print an explanation for people, and the advice that was measured."""
    from service.report.explained import sections, work

    say(f"{item.problem} on {item.device.name}")
    for label, text in work(item):
        say(f"  {label:<10} {text}")
    advice = (advice.text for advice in item.advice)
    for text in filter(None, (item.why, item.power, item.left, item.waits, *advice)):
        say("")
        say(text)
    if rows:
        say("")
        table("", _MEASURED, map(_cells, rows), left=2)
    elif rows is not None:
        say("")
        say("No advice is predicted of another problem: nothing to measure.")
    else:
        _say_how(item)
    for section in sections(item):
        if section.rows:
            say("")
            table("", (section.title, "candidate", "default"), section.rows, left=3)


def _say_how(item: Explanation) -> None:
    """How to measure what is predicted."""
    from service.cli.measuring import is_measurable

    command = typed(item.problem)
    if any(is_measurable(advice, item.problem) for advice in item.advice):
        say("")
        say(f"Measure what is predicted of other problems: gemmsmith explain {command} --measure")
    if any(not it.is_measured and it.problem == item.problem for it in item.advice):
        say("")
        say(f"Measure other tiles: gemmsmith tune {command}")


_MEASURED = ("advice", "problem", "predicted", "measured", "µs")


def _cells(row: MeasuredAdvice) -> tuple[str | None, ...]:
    advice = row.advice
    times = row.error if row.ratio is None else ratio(row.ratio)
    return advice.kind, str(advice.problem), ratio(advice.ratio), times, microseconds(row.us)
