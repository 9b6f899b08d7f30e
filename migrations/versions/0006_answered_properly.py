"""Idempotency keys belong to an API key; the audit is a chain of hashes."""

from __future__ import annotations

import hashlib
import json

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_AUDIT = sa.table(
    "audit",
    *(
        sa.column(name, kind)
        for name, kind in (
            ("id", sa.BigInteger()),
            ("at", sa.Double()),
            ("actor", sa.String()),
            ("action", sa.String()),
            ("subject", sa.String()),
            ("detail", sa.JSON()),
            ("previous", sa.String()),
            ("hash", sa.String()),
        )
    ),
)
_HEAD = sa.table(
    "audit_head",
    sa.column("id", sa.BigInteger()),
    sa.column("entries", sa.BigInteger()),
    sa.column("hash", sa.String()),
)


def upgrade() -> None:
    """Make the change."""
    op.add_column(
        "idempotency_keys",
        sa.Column("owner", sa.String(length=200), nullable=False, server_default=sa.text("''")),
    )
    # The key that ordered the job; who only joined it is not known, and orders anew.
    op.execute(
        "UPDATE idempotency_keys SET owner = coalesce("
        "(SELECT ordered_by FROM jobs WHERE jobs.id = idempotency_keys.job_id), '')"
    )
    with op.batch_alter_table("idempotency_keys") as table:
        table.drop_constraint("pk_idempotency_keys", type_="primary")
        table.create_primary_key("pk_idempotency_keys", ["owner", "key"])
    for name in ("previous", "hash"):
        op.add_column(
            "audit",
            sa.Column(name, sa.String(length=64), nullable=False, server_default=sa.text("''")),
        )
    op.create_table(
        "audit_head",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=False,
            nullable=False,
        ),
        sa.Column("entries", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_head"),
    )
    _link()


def downgrade() -> None:
    """Undo the change. Of an idempotency key that several API keys sent, the first use stays."""
    op.drop_table("audit_head")
    # Not in batch mode: rebuilding would lose AUTOINCREMENT, and SQLite can drop such columns.
    op.drop_column("audit", "hash")
    op.drop_column("audit", "previous")
    op.execute(
        "DELETE FROM idempotency_keys WHERE EXISTS (SELECT 1 FROM idempotency_keys AS other "
        "WHERE other.key = idempotency_keys.key AND (other.created_at < idempotency_keys.created_at"
        " OR (other.created_at = idempotency_keys.created_at"
        " AND other.owner < idempotency_keys.owner)))"
    )
    with op.batch_alter_table("idempotency_keys") as table:
        table.drop_constraint("pk_idempotency_keys", type_="primary")
        table.create_primary_key("pk_idempotency_keys", ["key"])
        table.drop_column("owner")


def _link() -> None:
    """Chain the entries that there are, as `tuner.store.audit` does."""
    connection = op.get_bind()
    previous, entries = "", 0
    for row in connection.execute(sa.select(_AUDIT).order_by(_AUDIT.c.id)).all():
        content = [previous, row.at, row.actor, row.action, row.subject, row.detail]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        connection.execute(
            sa.update(_AUDIT).where(_AUDIT.c.id == row.id).values(previous=previous, hash=digest)
        )
        previous, entries = digest, entries + 1
    if entries:
        connection.execute(sa.insert(_HEAD).values(id=1, entries=entries, hash=previous))
