"""`gemmsmith keys`, `gemmsmith audit`, and commands that ask a service which wants a key."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.commands import invoke as run
from tests.support.serving import new_settings, running
from tuner.store import Store


@pytest.fixture
def url(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GEMMSMITH_DATABASE", sqlite_url)
    return sqlite_url


def test_a_key_from_its_making_to_its_end(url: str) -> None:
    made = run("keys", "create", "ann", "--scope", "tune", "--expires", "90d", "--job-limit", 3)
    assert made.exit_code == 0
    secret = made.stdout.strip()  # alone on stdout, for KEY=$(gemmsmith keys create …)
    assert secret.startswith("gsk_")
    assert secret not in made.stderr
    assert "not shown again" in made.stderr
    (key,) = json.loads(run("keys", "list", "--json").stdout)["keys"]
    assert (key["name"], key["scope"], key["job_limit"]) == ("ann", "tune", 3)
    assert key["expires_at"] > key["created_at"]
    shown = run("keys", "list").stdout
    assert "ann" in shown
    assert key["prefix"] in shown
    assert secret not in shown
    assert "revoked" in run("keys", "revoke", "ann").stdout
    assert json.loads(run("keys", "list", "--json").stdout) == {"keys": []}
    assert len(json.loads(run("keys", "list", "--all", "--json").stdout)["keys"]) == 1


def test_the_audit_says_what_was_done(url: str) -> None:
    run("keys", "create", "ann")
    run("keys", "revoke", "ann", "--json")
    entries = json.loads(run("audit", "--json").stdout)["entries"]
    assert [(e["actor"], e["action"], e["subject"]) for e in entries] == [
        ("local", "key-revoked", "ann"),
        ("local", "key-created", "ann"),
    ]
    only = run("audit", "--action", "key-created", "--limit", 1).stdout
    assert "key-created" in only
    assert "key-revoked" not in only


def test_the_first_key_makes_the_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new.db"
    made = run("keys", "create", "ann", "--scope", "admin", "--database", url, "--json")
    assert json.loads(made.stdout)["key"].startswith("gsk_")
    with Store.open(url) as store:
        assert [key.name for key in store.keys.list()] == ["ann"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("keys", "create", "a/b"), 2, "NAME must be 1 … 100 of"),
        (("keys", "create", "local"), 2, "not local"),
        (("keys", "create", "x", "--scope", "root"), 2, "read, tune, admin, got 'root'"),
        (("keys", "create", "x", "--expires", "soon"), 2, "such as 90d, up to 3660d, got 'soon'"),
        (("keys", "create", "x", "--expires", "0d"), 2, "got '0d'"),
        (("keys", "create", "x", "--expires", "99999w"), 2, "up to 3660d"),
        (("keys", "create", "x", "--job-limit", "0"), 2, "job-limit must be in 1 … 1000000"),
        (
            ("keys", "create", "taken"),
            1,
            "named 'taken', and names are not used again",
        ),
        (("keys", "revoke", "nobody"), 2, "no active key named 'nobody'; see `gemmsmith keys"),
        (("audit", "--action", "eaten"), 2, "key-created, key-revoked, promoted"),
        *(
            (("audit", "--verify", "--head", head), 2, "64 hexadecimal digits that an earlier")
            for head in ("", " ", "none", "0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n")
        ),
    ],
)
def test_wrong_input_is_one_line(
    url: str, arguments: tuple[str, ...], status: int, message: str
) -> None:
    run("keys", "create", "taken")
    result = run(*arguments)
    assert result.exit_code == status
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_remote_commands_take_the_key_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = new_settings(tmp_path, require_keys=True)
    made = run("keys", "create", "ann", "--scope", "tune", "--database", settings.database)
    monkeypatch.delenv("GEMMSMITH_API_KEY", raising=False)
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    with running(settings) as http:
        url = str(http.base_url)
        refused = run("results", "--url", url, "--json")
        assert refused.exit_code == 1
        assert "GEMMSMITH_API_KEY" in refused.stderr
        assert refused.stderr.count("\n") == 1
        monkeypatch.setenv("GEMMSMITH_API_KEY", made.stdout.strip())
        elsewhere = run("results", "--url", url, "--json")  # not the service of GEMMSMITH_URL
        assert elsewhere.exit_code == 1
        assert "GEMMSMITH_URL" in elsewhere.stderr
        monkeypatch.setenv("GEMMSMITH_URL", url)
        assert run("results", "--json").exit_code == 0
        assert run("results", "--url", f"{url}/", "--json").exit_code == 0
        ordered = run("tune", 8, 8, 8, "--url", url, "--no-wait", "--json")
        assert ordered.exit_code == 0, ordered.stderr
        assert '"state": "waiting"' in ordered.stdout  # so does the service's log
        monkeypatch.setenv("GEMMSMITH_API_KEY", "not a key")
        wrong = run("best", 8, 8, 8, "--url", url)
        assert wrong.exit_code == 2
        assert "GEMMSMITH_API_KEY is no API key" in wrong.stderr


def test_the_audit_is_checked(url: str) -> None:
    run("keys", "create", "ann")
    told = json.loads(run("audit", "--verify", "--json").stdout)
    assert told["fault"] is None
    head = told["head"]
    run("keys", "revoke", "ann")
    assert "none changed or removed" in run("audit", "--verify", "--head", head).stdout
    assert run("audit", "--head", head).exit_code == 2
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
        database.execute("UPDATE audit SET actor = 'eve' WHERE id = 1")
        database.commit()
    checked = run("audit", "--verify")
    assert (checked.exit_code, "entry 1 was changed" in checked.stdout) == (1, True)
    assert run("audit").stdout.count("CHANGED") == 1
