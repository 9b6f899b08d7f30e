"""How `gemmsmith.pth` gets into site-packages itself: a build command of setuptools.

There Python reads it when it starts. setuptools only takes what lies in a package, or as a wheel's
data, which an editable install leaves out.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py

PTH = "gemmsmith.pth"


class BuildPy(build_py):
    """Builds the package, with the file beside it."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        target = Path(self.build_lib)
        if self.editable_mode:  # what is built is not installed, but for what is here already
            target = Path(self.get_finalized_command("install").install_lib)
        target.mkdir(parents=True, exist_ok=True)
        self.copy_file(PTH, str(target / PTH), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """What the build makes."""
        made = [] if self.editable_mode else [str(Path(self.build_lib, PTH))]
        return [*super().get_outputs(include_bytecode), *made]

    def get_source_files(self) -> list[str]:
        """What a source distribution needs."""
        return [*super().get_source_files(), PTH, "pth.py"]
