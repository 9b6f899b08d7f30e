"""These tests live alone: a service may run beside them, in this checkout and for this user."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

from gemmsmith.answers.cache import default_cache_dir
from gemmsmith.files import data_folder
from gemmsmith.signing import trusted_folder
from service.settings import Settings

PLACES = """
import sys
from pathlib import Path
from gemmsmith.answers.cache import default_cache_dir
print(Path.home(), default_cache_dir())
"""


def test_nothing_of_this_users_is_met() -> None:
    home = Path(os.environ["GEMMSMITH_TEST_HOME"])
    settings = Settings.load()
    assert settings.port == 0
    assert settings.database.startswith(f"sqlite:///{home}/")
    places = (
        *(settings.packs, settings.signing_key, settings.winners, settings.trusted),
        *(Path.home(), default_cache_dir(), data_folder(), trusted_folder()),
    )
    assert all(place.is_relative_to(home) for place in places), places
    assert home != Path(pwd.getpwuid(os.getuid()).pw_dir)


def test_nor_by_the_programs_that_tests_start() -> None:
    home = os.environ["GEMMSMITH_TEST_HOME"]
    places = subprocess.check_output([sys.executable, "-c", PLACES], text=True).split()
    assert all(place.startswith(home) for place in places)
