"""The embedded engine behind OpenAI's HTTP API, so that any client, load generator or tool made for vLLM can be pointed at it.

`engine_thread.py` owns the engine; `app.py` is the HTTP side; `metrics_page.py` and `kv_publisher.py` tell what vLLM tells.
"""
