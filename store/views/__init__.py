"""Views over the kinds' tables, one SQL file each; installed when their text changes."""

from __future__ import annotations

import duckdb


def install_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the views."""
