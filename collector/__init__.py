"""Wires: FastAPI app, ingest, read API, `/metrics`, pages, settings, command line. The only folder that sees all others."""
