"""Speaks: the event contract, the recorder, the sinks, the engine adapters. Importing it costs milliseconds."""
