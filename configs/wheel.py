"""A build command of setuptools that puts `configs/` and `migrations/` into the wheel.

They are beside the packages, and setuptools only takes files within packages. In the wheel they are
`tuner/files/…`, where `tuner.places` looks for them. An editable install needs no copy.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py

PATTERNS = (
    "configs/ceilings/*.json",
    "configs/profiles/*.jsonl",
    "configs/suites/*.toml",
    "configs/sweeps/*.jsonl.zst",
    "configs/trusted/*.pub",
    "configs/winners/*.jsonl",
    "migrations/*.py",
    "migrations/versions/*.py",
)


class BuildPy(build_py):
    """Builds the packages, and copies the program's other files into them."""

    def run(self) -> None:
        """See setuptools' `build_py`."""
        super().run()
        if not self.editable_mode:
            for source, target in self._files().items():
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(source), str(target), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """See setuptools' `build_py`."""
        copies = [] if self.editable_mode else [str(target) for target in self._files().values()]
        return [*super().get_outputs(include_bytecode), *copies]

    def get_source_files(self) -> list[str]:
        """See setuptools' `build_py`."""
        return [*super().get_source_files(), "configs/wheel.py", *map(str, self._files())]

    def _files(self) -> dict[Path, Path]:
        folder = Path(self.build_lib, "tuner", "files")
        files: dict[Path, Path] = {}
        for pattern in PATTERNS:
            matched = sorted(Path().glob(pattern))
            if not matched:
                raise FileNotFoundError(f"{pattern}: nothing to put into the wheel")
            files |= {path: folder / path for path in matched}
        return files
