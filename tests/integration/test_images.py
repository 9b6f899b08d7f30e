"""configs/deploy/Containerfile: both images, built where somebody asks for it.

Builds download the base and hundreds of packages, gigabytes for the worker's image. So only those
named in `GEMMSMITH_TEST_IMAGES` are built: `service`, or `service,worker`. What a builder needs
beside that, such as `--volume /etc/pip.conf:/etc/pip.conf:ro` behind a proxy, is taken from
`GEMMSMITH_TEST_BUILD`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from gemmsmith.version import VERSION
from tests.support.shipped import ROOT

FILE = ROOT / "configs" / "deploy" / "Containerfile"

pytestmark = pytest.mark.long


def buildah(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(params=["service", "worker"])
def image(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of an image that was just built."""
    if request.param not in os.environ.get("GEMMSMITH_TEST_IMAGES", "").split(","):
        pytest.skip("images are built where GEMMSMITH_TEST_IMAGES=service,worker is set")
    if shutil.which("buildah") is None:
        pytest.skip("buildah is missing: apt-get install buildah")
    (base,) = re.findall(r"^FROM (\S+) AS base$", FILE.read_text(encoding="utf-8"), re.MULTILINE)
    pulled = buildah("pull", "--policy", "missing", base)
    if pulled.returncode:
        pytest.skip(f"{base} cannot be had: {pulled.stderr.strip().splitlines()[-1]}")
    name = f"localhost/gemmsmith-test-{request.param}"
    extra = shlex.split(os.environ.get("GEMMSMITH_TEST_BUILD", ""))
    chosen = ("--isolation=chroot", "--target", request.param, "--file", str(FILE), "--tag", name)
    built = buildah("build", *chosen, *extra, str(ROOT))
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    yield name
    buildah("rmi", "--force", name)


def test_an_image_is_built_and_runs_the_program_as_somebody_else_than_root(image: str) -> None:
    made = buildah("from", image)
    assert made.returncode == 0, made.stderr
    container = made.stdout.strip()
    try:
        said = buildah("run", "--isolation=chroot", container, "--", "gemmsmith", "--version")
        assert (said.returncode, VERSION in said.stdout) == (0, True), said
        who = buildah("run", "--isolation=chroot", container, "--", "id", "-un")
        assert who.stdout.strip() == "gemmsmith"
    finally:
        buildah("rm", container)
