"""A streaming reverse proxy in front of engines and closed APIs: passes every byte on as it came, stamps it, keeps no content.

Two halves that meet in `exchange.py`. The wire half (`heads`, `framing`, `client_side`, `upstream_side`, `upstreams`)
moves bytes and knows HTTP/1.1; the reading half (`inflate`, `sse`, `dialects/`, `watch`, `rows`) looks at copies of the
answer after they were passed on, and turns what it saw into rows of the event contract. The reading half can fail in any
way without the client noticing.
"""
