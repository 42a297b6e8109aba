"""Remembers: tables, migrations, writer, typed queries, retention, Parquet. The only folder that imports duckdb and sqlalchemy."""
