"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# SQLite numbers rows by itself only where the column is spelt INTEGER.
ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the change."""
    op.create_table(
        "api_keys",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("key_hash", sa.String(length=128), nullable=False),
        sa.Column("scopes", sa.String(length=200), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("key_hash", name="uq_api_keys_key_hash"),
    )
    op.create_table(
        "devices",
        sa.Column("id", ID, nullable=False),
        sa.Column("slug", sa.String(length=200), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("arch", sa.String(length=20), nullable=False),
        sa.Column("sm_count", sa.Integer(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("l2_bytes", sa.BigInteger(), nullable=False),
        sa.Column("max_clock_mhz", sa.Integer(), nullable=False),
        sa.Column("memory_bandwidth", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_devices"),
        sa.UniqueConstraint("slug", name="uq_devices_slug"),
    )
    op.create_table(
        "environments",
        sa.Column("id", ID, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("description", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_environments"),
        sa.UniqueConstraint("digest", name="uq_environments_digest"),
    )
    op.create_table(
        "kernels",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(length=300), nullable=False),
        sa.Column("description", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kernels"),
        sa.UniqueConstraint("name", name="uq_kernels_name"),
    )
    op.create_table(
        "packs",
        sa.Column("id", ID, nullable=False),
        sa.Column("hash", sa.String(length=128), nullable=False),
        sa.Column("toolchain", sa.String(length=128), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_packs"),
        sa.UniqueConstraint("hash", name="uq_packs_hash"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "problems",
        sa.Column("id", ID, nullable=False),
        sa.Column("dtype", sa.String(length=20), nullable=False),
        sa.Column("layout", sa.String(length=4), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("m", sa.Integer(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("lg_m", sa.Double(), nullable=False),
        sa.Column("lg_n", sa.Double(), nullable=False),
        sa.Column("lg_k", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_problems"),
        sa.UniqueConstraint("dtype", "layout", "batch", "m", "n", "k", name="uq_problems_identity"),
    )
    op.create_index(
        "ix_problems_near", "problems", ["dtype", "layout", "batch", "lg_m"], unique=False
    )

    op.create_table(
        "jobs",
        sa.Column("id", ID, nullable=False),
        sa.Column("public_id", sa.String(length=40), nullable=False),
        sa.Column("problem_id", ID, nullable=False),
        sa.Column("effort", sa.String(length=20), nullable=False),
        sa.Column("device", sa.String(length=200), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("active_key", sa.String(length=300), nullable=True),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("phase", sa.String(length=40), nullable=False),
        sa.Column("done", sa.Integer(), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("best_us", sa.Double(), nullable=True),
        sa.Column("best", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("winner_revision", sa.Integer(), nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("handed_back", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("available_at", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("last_event", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_jobs_problem_id"),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("active_key", name="uq_jobs_active_key"),
        sa.UniqueConstraint("public_id", name="uq_jobs_public_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_lease", "jobs", ["state", "priority", "id"], unique=False)

    op.create_table(
        "pack_kernels",
        sa.Column("pack_id", ID, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("kernel_id", ID, nullable=False),
        sa.ForeignKeyConstraint(["kernel_id"], ["kernels.id"], name="fk_pack_kernels_kernel_id"),
        sa.ForeignKeyConstraint(
            ["pack_id"], ["packs.id"], name="fk_pack_kernels_pack_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("pack_id", "position", name="pk_pack_kernels"),
    )
    op.create_index("ix_pack_kernels_kernel_id", "pack_kernels", ["kernel_id"], unique=False)

    op.create_table(
        "trials",
        sa.Column("id", ID, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("problem_id", ID, nullable=False),
        sa.Column("device_id", ID, nullable=False),
        sa.Column("environment_id", ID, nullable=False),
        sa.Column("kernel_id", ID, nullable=False),
        sa.Column("launch_key", sa.String(length=100), nullable=False),
        sa.Column("launch", sa.JSON(), nullable=False),
        sa.Column("phase", sa.String(length=20), nullable=False),
        sa.Column("job", sa.String(length=100), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=True),
        sa.Column("ci_low_us", sa.Double(), nullable=True),
        sa.Column("ci_high_us", sa.Double(), nullable=True),
        sa.Column("samples", sa.Integer(), nullable=True),
        sa.Column("samples_us", sa.JSON(), nullable=False),
        sa.Column("failure_kind", sa.String(length=20), nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column("correctness", sa.JSON(), nullable=True),
        sa.Column("conditions", sa.JSON(), nullable=True),
        sa.Column("workspace_bytes", sa.BigInteger(), nullable=False),
        sa.Column("cost_s", sa.Double(), nullable=False),
        sa.Column("replayed", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_trials_device_id"),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["environments.id"], name="fk_trials_environment_id"
        ),
        sa.ForeignKeyConstraint(["kernel_id"], ["kernels.id"], name="fk_trials_kernel_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_trials_problem_id"),
        sa.PrimaryKeyConstraint("id", name="pk_trials"),
        sa.UniqueConstraint(
            "problem_id",
            "device_id",
            "kernel_id",
            "launch_key",
            "phase",
            "environment_id",
            "job",
            name="uq_trials_identity",
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_trials_job", "trials", ["job", "id"], unique=False)

    op.create_table(
        "winners",
        sa.Column("id", ID, nullable=False),
        sa.Column("problem_id", ID, nullable=False),
        sa.Column("device_id", ID, nullable=False),
        sa.Column("environment_id", ID, nullable=False),
        sa.Column("kernel_id", ID, nullable=True),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("is_current", sa.Boolean(), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("origin", sa.String(length=20), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("use", sa.String(length=20), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=True),
        sa.Column("speedup", sa.Double(), nullable=True),
        sa.Column("launch", sa.JSON(), nullable=True),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.Column("replayed", sa.Boolean(), nullable=False),
        sa.Column("pack", sa.String(length=128), nullable=True),
        sa.Column("promoted_at", sa.String(length=40), nullable=False),
        sa.Column("job", sa.String(length=100), nullable=True),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_winners_device_id"),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["environments.id"], name="fk_winners_environment_id"
        ),
        sa.ForeignKeyConstraint(["kernel_id"], ["kernels.id"], name="fk_winners_kernel_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_winners_problem_id"),
        sa.PrimaryKeyConstraint("id", name="pk_winners"),
        sa.UniqueConstraint("problem_id", "device_id", "revision", name="uq_winners_revision"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_winners_device_id", "winners", ["device_id"], unique=False)
    op.create_index("ix_winners_sequence", "winners", ["sequence"], unique=False)
    op.create_index(
        "uq_winners_current",
        "winners",
        ["problem_id", "device_id"],
        unique=True,
        sqlite_where=sa.text("is_current"),
        postgresql_where=sa.text("is_current"),
    )

    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_idempotency_keys_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("key", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_job_id", "idempotency_keys", ["job_id"], unique=False)

    op.create_table(
        "job_events",
        sa.Column("job_id", ID, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_job_events_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_job_events"),
    )


def downgrade() -> None:
    """Undo the change."""
    for table in (
        "job_events",
        "idempotency_keys",
        "winners",
        "trials",
        "pack_kernels",
        "jobs",
        "problems",
        "packs",
        "kernels",
        "environments",
        "devices",
        "api_keys",
    ):
        op.drop_table(table)
