"""Run llama.cpp's own HTTP server on 127.0.0.1; started by `tests.servers.running_llama_server` in llama's environment.

Arguments: model file, port, context size in tokens over all slots, number of slots.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main(model: str, port: int, ctx_size: int, num_slots: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_ctx = ctx_size
    params.n_parallel = num_slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.endpoint_metrics = params.endpoint_slots = True
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
