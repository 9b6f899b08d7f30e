"""How `configs/` and `migrations/` get into the wheel: a build command of setuptools.

They lie beside the packages, and setuptools only takes what lies in one. In the wheel they are
`tuner/files/…`, where `tuner.places` finds them. An editable install needs no copy.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py

PATTERNS = (
    "configs/ceilings/*.json",
    "configs/suites/*.toml",
    "configs/sweeps/*.jsonl.zst",
    "configs/trusted/*.pub",
    "configs/winners/*.jsonl",
    "migrations/*.py",
    "migrations/versions/*.py",
)


class BuildPy(build_py):
    """Builds the packages, with the files that come with the program inside."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if not self.editable_mode:
            for source, target in self._files().items():
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(source), str(target), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """What the build makes."""
        made = [] if self.editable_mode else [str(target) for target in self._files().values()]
        return [*super().get_outputs(include_bytecode), *made]

    def get_source_files(self) -> list[str]:
        """What a source distribution needs."""
        return [*super().get_source_files(), "configs/wheel.py", *map(str, self._files())]

    def _files(self) -> dict[Path, Path]:
        into = Path(self.build_lib, "tuner", "files")
        found: dict[Path, Path] = {}
        for pattern in PATTERNS:
            matched = sorted(Path().glob(pattern))
            if not matched:
                raise FileNotFoundError(f"{pattern}: nothing to put into the wheel")
            found |= {path: into / path for path in matched}
        return found
