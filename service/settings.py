"""The settings of the service and of the worker, built once at start.

Every field can come from the environment (`GEMMSMITH_<FIELD>`), and the command line overrides
that. A value that cannot be used raises `SettingsError`, which names the variable and what it
takes.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gemmsmith.files import private_folder, unsafe
from gemmsmith.signing import trusted_folder
from tuner import places

PREFIX = "GEMMSMITH_"


class SettingsError(ValueError):
    """A setting cannot be used; the message says which, and what to do."""


class Settings(BaseModel):
    """What `gemmsmith serve` and `gemmsmith worker` run with.

    Attributes:
        database: SQLAlchemy URL of the store; SQLite on a local disk, or PostgreSQL.
        packs: folder of the compiled kernel packs.
        packs_limit_gb: size limit of that folder, in units of 10⁹ bytes. Above it, the packs that
            were not used for longest are removed, but never those of winners.
        kernels: a file of kernels, as a path or an http URL, which services and workers install at
            their start (`gemmsmith kernels install`).
        signing_key: file of the private key that this installation signs with; created on first
            use.
        trusted: folder of the trusted public keys, besides those of `shipped_keys`.
        shipped_keys: folder of the public keys that came with the shipped winners.
        unsigned: accept winners and packs from elsewhere that no trusted key has signed.
        winners: folder of shipped winners, loaded into a new database and when the service starts.
            A folder that does not exist counts as empty.
        sweeps: folder of recorded sweeps, for `replay:` devices.
        host, port: where to listen; port 0 takes a free one.
        require_keys: require API keys on the loopback interface too (behind a proxy, for example).
            On other interfaces they are always required.
        device: what the worker measures on (`cuda:0`, `replay:<name>`). Empty for the local GPU, or
            the recorded one if there is no GPU.
        default_model: slug of the device model that a lookup without `device` means if there is no
            local GPU. The first known model is used if the database does not know this one.
        queue_limit: jobs that may wait at once; further requests get 429 until some are done.
        key_job_limit: jobs that one API key may have waiting or running, unless the key has a limit
            of its own.
        answers_kept: answers held in memory, about 3 KB each; the least recently used are dropped.
        max_body_bytes: largest request body; 10,000 problems in one batch are about 1 MB.
        connections: connections open at once, at most the limit of open files; a quarter of them
            may be event streams.
        client_connections: the same limit for one client address; 0 for a quarter of all.
        trusted_proxies: addresses and networks of proxies, separated by commas, whose headers about
            a client's address and scheme are used (`X-Forwarded-For`, `X-Forwarded-Proto`).
        idle_timeout_s: how long a connection may be open without a request.
        request_timeout_s: time limit for a request's head, for its body, and for the client to
            take the next piece of its answer.
        lookups_limit: problems that the batches of one client may have in progress at once.
        events_poll_s: how often an event stream looks for new events.
        events_heartbeat_s: how often an idle event stream sends a comment, so that proxies and
            clients see that it is alive.
        stop_timeout_s: time that requests and the worker have to finish after SIGTERM.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    database: str = Field(default_factory=lambda: f"sqlite:///{places.state()}/gemmsmith.db")
    packs: Path = Field(default_factory=lambda: places.state() / "packs")
    packs_limit_gb: float = Field(default=4.0, gt=0, allow_inf_nan=False)
    kernels: str = ""
    signing_key: Path = Field(default_factory=lambda: places.state() / "signing.key")
    trusted: Path = Field(default_factory=trusted_folder)
    shipped_keys: Path = Field(default_factory=lambda: places.shipped("configs/trusted"))
    unsigned: bool = False
    winners: Path = Field(default_factory=lambda: places.shipped("configs/winners"))
    sweeps: Path = Field(default_factory=lambda: places.shipped("configs/sweeps"))
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    require_keys: bool = False
    device: str = ""
    default_model: str = "nvidia-h200-132sm"
    log_json: bool = False
    queue_limit: int = Field(default=10_000, ge=1)
    key_job_limit: int = Field(default=1_000, ge=1)
    answers_kept: int = Field(default=50_000, ge=1)
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    connections: int = Field(default=4_096, ge=1)
    client_connections: int = Field(default=0, ge=0)
    trusted_proxies: str = ""
    idle_timeout_s: float = Field(default=5.0, gt=0)
    request_timeout_s: float = Field(default=30.0, gt=0)
    lookups_limit: int = Field(default=50_000, ge=1)
    events_poll_s: float = Field(default=0.25, gt=0)
    events_heartbeat_s: float = Field(default=15.0, gt=0)
    stop_timeout_s: float = Field(default=20.0, gt=0)

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, names: str) -> str:
        """Return the networks without blanks, in the form that uvicorn takes."""
        words = (word.strip() for word in names.split(","))
        try:
            return ",".join(str(ipaddress.ip_network(word)) for word in words if word)
        except ValueError as error:
            raise ValueError(
                f"takes addresses and networks, separated by commas, such as 10.0.0.7,10.1.0.0/16 "
                f"({error})"
            ) from None

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Build from the environment; an override that is not None replaces its variable.

        An empty variable counts as not set, because an empty path would be the working folder.

        Raises:
            SettingsError: a value cannot be used.
        """
        source = os.environ if environ is None else environ
        values: dict[str, Any] = {
            field: source[PREFIX + field.upper()]
            for field in cls.model_fields
            if source.get(PREFIX + field.upper())
        }
        values |= {field: value for field, value in overrides.items() if value is not None}
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            field = str(first["loc"][0])
            raise SettingsError(
                f"{field} (or {PREFIX}{field.upper()}): {first['msg']}, got {first['input']!r}"
            ) from error

    def environment(self) -> dict[str, str]:
        """Return the same settings as environment variables, for a child process."""
        return {
            PREFIX + field.upper(): str(value)
            for field, value in self.model_dump(mode="json").items()
        }

    @property
    def keys_required(self) -> bool:
        return self.require_keys or not _is_loopback(self.host)

    def create_folders(self) -> None:
        """Create the folders of the database and of the packs, for their owner only.

        Raises:
            SettingsError: a folder cannot be created, or other users may write to the packs.
        """
        for field, folder in self.volumes().items():
            try:
                private_folder(folder)
            except OSError as error:
                raise SettingsError(
                    f"{field} (or {PREFIX}{field.upper()}): cannot make the folder {folder}: "
                    f"{error.strerror}. Name another place"
                ) from error
        if reason := unsafe(self.packs):
            raise SettingsError(f"packs (or {PREFIX}PACKS): {reason}")

    def volumes(self) -> dict[str, Path]:
        """Return the folders that are written to, by purpose: `packs`, and `database` if local."""
        folders = {"packs": self.packs}
        scheme, _, path = self.database.partition(":///")
        if scheme.startswith("sqlite") and path not in ("", ":memory:"):
            folders["database"] = Path(path).parent
        return folders


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
