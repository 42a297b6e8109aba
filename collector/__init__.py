"""Wires: FastAPI app, ingest, read API, `/metrics`, pages, settings, command line. It alone sees all other folders."""
