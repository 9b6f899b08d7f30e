"""`gemmsmith explain`: why the fastest known kernel of a problem is the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from service.cli.best import answering
from service.cli.options import (
    DeviceSlug,
    Packs,
    ProblemOptions,
    SourceOptions,
    load_settings,
    typed,
)
from service.cli.output import CommandError, Result, say, table
from service.cli.session import connect, model_of

if TYPE_CHECKING:
    from tuner.explain import Explanation


def explain(
    shape: ProblemOptions, device: DeviceSlug = None, packs: Packs = None, *, source: SourceOptions
) -> Result:
    """Say why the winner of M N K is fastest: tiles, waves, occupancy, limits, energy, time.

    The winner and the default are side by side. Figures follow from what was recorded; estimates
    are named so.
    """
    problem = shape.problem
    if source.url:
        with connect(source.url) as client:
            document = client.explain(problem, device=device)
        return Result(document, lambda: _show(read_explanation(document)))
    from service import documents
    from service.explaining import explanation_of
    from tuner.compile import ArtifactStore

    settings = load_settings(database=source.database, packs=packs)
    with answering(settings, source.database) as store:
        model = model_of(settings, device, store)
        winner = store.winner(problem, model.slug)
        if winner is not None:
            item = explanation_of(winner, store, ArtifactStore(settings.packs))
            return Result(documents.explanation(item), lambda: _show(item))
        near = store.near_winners(problem, model.slug, limit=1)
    nearest = ""
    if near:
        nearest = f". Or explain the nearest: gemmsmith explain {typed(near[0].problem)}"
    raise CommandError(
        f"{problem} was not tuned on {model.name}. Tune it: gemmsmith tune {typed(problem)}"
        f"{nearest}"
    )


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


def _show(item: Explanation) -> None:
    """Print an explanation for people."""
    from service.report.explained import sections, work

    say(f"{item.problem} on {item.device.name}")
    for label, text in work(item):
        say(f"  {label:<10} {text}")
    for text in filter(None, (item.why, item.power, item.left, item.waits, *_advice(item))):
        say("")
        say(text)
    for section in sections(item):
        if section.rows:
            say("")
            table("", (section.title, "candidate", "default"), section.rows, left=3)


def _advice(item: Explanation) -> Iterator[str]:
    if item.advice is not None:
        measure = "" if item.advice.is_measured else " Measure it: gemmsmith tune "
        yield f"{item.advice.text}{measure}{typed(item.advice.padded) if measure else ''}"
