"""How often a job's problem is run, and what tuning it is expected to save."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the change."""
    # The default fills the rows there are, and spares SQLite rebuilding the table.
    zero = sa.text("0")
    op.add_column("jobs", sa.Column("calls", sa.BigInteger(), nullable=False, server_default=zero))
    op.add_column("jobs", sa.Column("saving_us", sa.Double(), nullable=False, server_default=zero))


def downgrade() -> None:
    """Undo the change."""
    # Not in batch mode: rebuilding would lose AUTOINCREMENT, and SQLite can drop such columns.
    op.drop_column("jobs", "saving_us")
    op.drop_column("jobs", "calls")
