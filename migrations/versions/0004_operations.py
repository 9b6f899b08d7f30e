"""Problems differ in their operation; a winner's price is called its power penalty."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the change."""
    op.add_column(
        "problems",
        sa.Column("operation", sa.String(length=120), nullable=False, server_default=sa.text("''")),
    )
    op.execute("UPDATE problems SET operation = dtype || '.' || layout")
    # SQLite rebuilds the table. Nothing is lost: its ids were never reused, as no row is deleted.
    with op.batch_alter_table("problems") as table:
        table.drop_index("ix_problems_near")
        table.drop_constraint("uq_problems_identity", type_="unique")
        table.alter_column(
            "operation", existing_type=sa.String(length=120), nullable=False, server_default=None
        )
        table.alter_column(
            "dtype", existing_type=sa.String(length=20), type_=sa.String(length=120), nullable=False
        )
        table.create_unique_constraint(
            "uq_problems_identity", ["operation", "batch", "m", "n", "k"]
        )
        table.create_index("ix_problems_near", ["operation", "batch", "lg_m"])
    _rename("price", "power_penalty")


def downgrade() -> None:
    """Undo the change.

    Operations that revision 0003 does not know stay as they are; its program cannot read them.
    """
    with op.batch_alter_table("problems") as table:
        table.drop_index("ix_problems_near")
        table.drop_constraint("uq_problems_identity", type_="unique")
        table.create_unique_constraint(
            "uq_problems_identity", ["dtype", "layout", "batch", "m", "n", "k"]
        )
        table.create_index("ix_problems_near", ["dtype", "layout", "batch", "lg_m"])
        table.drop_column("operation")
    _rename("power_penalty", "price")


def _rename(before: str, after: str) -> None:
    """Rename a field of the winners' records, as text: no number in them is written anew."""
    winners = sa.table("winners", sa.column("record", sa.Text()))
    text = sa.func.replace(
        sa.cast(winners.c.record, sa.Text()), f'"{before}":', f'"{after}":', type_=sa.Text()
    )
    is_sqlite = op.get_bind().dialect.name == "sqlite"  # where a column of JSON is one of text
    op.execute(sa.update(winners).values(record=text if is_sqlite else sa.cast(text, sa.JSON())))
