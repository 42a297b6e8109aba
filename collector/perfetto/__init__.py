"""What happened, as one trace on a time axis: requests, steps, blocks and routes, for ui.perfetto.dev."""
