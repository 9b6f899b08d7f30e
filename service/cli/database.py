"""`gemmsmith db`: the database's schema."""

from __future__ import annotations

import typer

from service.cli.options import AsJson, Database, load_settings, shown
from service.cli.output import emit, say

app = typer.Typer(help="Create, migrate and look at the database.", no_args_is_help=True)


@app.command("upgrade")
def upgrade(database: Database = None, as_json: AsJson = False) -> None:
    """Create the database, or bring it to the schema this version needs. Safe to repeat."""
    from tuner import store

    url = load_settings(database=database).database
    where = shown(url)
    before = store.current(url)
    after = store.upgrade(url)
    if as_json:
        emit({"database": where, "before": before, "after": after})
    elif before == after:
        say(f"{where} is at schema {after} already")
    else:
        say(f"{where}: schema {before or 'none'} → {after}")


@app.command("current")
def current(database: Database = None, as_json: AsJson = False) -> None:
    """Print the database's schema and the one this version needs; status 1 when they differ."""
    from tuner import store

    url = load_settings(database=database).database
    where = shown(url)
    found, needed = store.current(url), store.head()
    if as_json:
        emit({"database": where, "current": found, "head": needed, "up_to_date": found == needed})
    else:
        say(f"{where}: schema {found or 'none'}, this gemmsmith needs {needed}")
        if found != needed:
            say(f"run: gemmsmith db upgrade --database {where}")
    if found != needed:
        raise typer.Exit(1)
