"""Keys with limits, an audit, GPUs and their environments, jobs' deadlines and owners."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# SQLite numbers rows by itself only where the column is spelt INTEGER.
ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the change."""
    op.create_table(
        "gpus",
        sa.Column("uuid", sa.String(length=80), nullable=False),
        sa.Column("device_id", ID, nullable=False),
        sa.Column("environment_id", ID, nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_gpus_device_id"),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["environments.id"], name="fk_gpus_environment_id"
        ),
        sa.PrimaryKeyConstraint("uuid", name="pk_gpus"),
    )
    op.create_table(
        "audit",
        sa.Column("id", ID, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("action", sa.String(length=40), nullable=False),
        sa.Column("subject", sa.String(length=300), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
        sqlite_autoincrement=True,
    )
    op.add_column(
        "api_keys",
        sa.Column("prefix", sa.String(length=20), nullable=False, server_default=sa.text("''")),
    )
    op.add_column("api_keys", sa.Column("expires_at", sa.Double(), nullable=True))
    op.add_column("api_keys", sa.Column("job_limit", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("ordered_by", sa.String(length=200), nullable=True))
    op.add_column("jobs", sa.Column("deadline_at", sa.Double(), nullable=True))
    op.create_index("ix_jobs_ordered_by", "jobs", ["ordered_by", "state"], unique=False)
    op.create_index(
        "ix_winners_gain",
        "winners",
        ["device_id", "speedup"],
        unique=False,
        sqlite_where=sa.text("is_current"),
        postgresql_where=sa.text("is_current"),
    )


def downgrade() -> None:
    """Undo the change."""
    # Not in batch mode: rebuilding would lose AUTOINCREMENT, and SQLite can drop such columns.
    op.drop_index("ix_winners_gain", table_name="winners")
    op.drop_index("ix_jobs_ordered_by", table_name="jobs")
    op.drop_column("jobs", "deadline_at")
    op.drop_column("jobs", "ordered_by")
    op.drop_column("api_keys", "job_limit")
    op.drop_column("api_keys", "expires_at")
    op.drop_column("api_keys", "prefix")
    op.drop_table("audit")
    op.drop_table("gpus")
