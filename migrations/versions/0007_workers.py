"""Workers report that they live."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the change."""
    op.create_table(
        "workers",
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("devices", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name="pk_workers"),
    )


def downgrade() -> None:
    """Undo the change."""
    op.drop_table("workers")
