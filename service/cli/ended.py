"""A program that has ended, with what its processes have captured into a folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gemmsmith.program.captured import Captured
from gemmsmith.program.ran import Ran
from gemmsmith.program.variables import LOADED, PRODUCTS, RAN, SEEN, STOPPED
from service.cli.output import note


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A program that has ended.

    Attributes:
        status: its exit status; 128 and the number of the signal that killed it.
        captured: the products of all its processes.
        processes: how many processes had products.
        stopped: it was ended after the steps that were to be captured.
        reason: why nothing was captured; empty if something was.
        ran: which kernels ran the products, if the program wrote it.
    """

    status: int
    captured: Captured
    processes: int
    stopped: bool
    reason: str
    ran: Ran

    @classmethod
    def of(cls, status: int, folder: Path) -> Ended:
        """What the processes of a program left in the folder of their captures."""
        captured, processes = Captured(), 0
        ran: list[Ran] = []
        try:
            names = sorted(path.name for path in folder.iterdir())
        except OSError:  # the program has removed the folder
            names = []
        for name in names:
            if name.endswith(RAN):
                with suppress(OSError, ValueError):
                    ran.append(Ran.parse(_read(folder / name)))
            if name.endswith(PRODUCTS):
                try:
                    of_process = Captured.parse(_read(folder / name))
                except (OSError, ValueError):
                    captured.unseen["files in the folder of the capture that hold none"] += 1
                    continue
                captured.add(of_process)
                processes += bool(of_process.problems)
        # Each process leaves a file when the hook is loaded in it, and another once torch is.
        with_torch, with_gemmsmith = (
            sum(name.endswith(ending) for name in names) for ending in (LOADED, SEEN)
        )
        return cls(
            status=status,
            captured=captured,
            processes=processes,
            stopped=STOPPED in names,
            reason="" if captured.problems else _no_products(captured, with_torch, with_gemmsmith),
            ran=Ran.together(ran),
        )

    @property
    def unseen(self) -> list[str]:
        unseen = sorted(self.captured.unseen.items())
        return [f"not captured: {name} ({count})" for name, count in unseen]

    def with_numerics(self, numerics: str | None) -> Ended:
        """The same with `Captured.with_numerics`."""
        captured = self.captured.with_numerics(numerics)
        reason = "" if captured.problems else self.reason or "no product has an order of sums"
        return replace(self, captured=captured, reason=reason)

    def save(self, output: Path) -> None:
        """Write the suite; only print a line if the program failed and it cannot be written.

        Raises:
            OSError: the file cannot be written.
        """
        try:
            self.captured.save(output)
        except OSError as error:
            if not self.status:
                raise
            note(f"{output} cannot be written: {error.strerror}")


def _read(path: Path) -> bytes:
    # Reading a pipe may never end.
    if not path.is_file():
        raise OSError(f"{path} is no file")
    return path.read_bytes()


def _no_products(captured: Captured, with_torch: int, with_gemmsmith: int) -> str:
    """Why no product was captured that a kernel supports."""
    skipped = captured.skipped
    if skipped:
        types = ", ".join(f"{count} of {name}" for name, count in skipped.most_common(3))
        return f"kernels are for none of the {skipped.total()} products that ran ({types})"
    if with_torch:
        return (
            f"no matrix product ran in the {with_torch} processes that imported torch, or they "
            "were killed"
        )
    if with_gemmsmith:
        return f"none of the {with_gemmsmith} Python processes has imported torch"
    from tuner.extras import library

    return (
        f"no Python ran that has gemmsmith installed: `pip install {library()}` where the "
        "program's Python is (one started with -S or -I, or from a copied folder, does not count)"
    )
