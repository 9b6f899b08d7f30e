"""Winners carry the signature of the installation that measured them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the change. What is there already goes on being answered as it was."""
    op.add_column("winners", sa.Column("signature", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Undo the change; winners that were never believed stay, and stay unanswered."""
    op.drop_column("winners", "signature")
