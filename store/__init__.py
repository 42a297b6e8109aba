"""Remembers: tables, migrations, writer, typed queries, retention, Parquet. Alone imports duckdb and sqlalchemy."""
