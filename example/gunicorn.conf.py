"""Gunicorn for the demo: two processes, and an end when whoever started it is gone."""

import os
import signal
import threading

workers = 2
worker_class = "gthread"
threads = 16
graceful_timeout = 2
loglevel = "warning"
control_socket_disable = True


def on_starting(server: object) -> None:
    """Standard input is a pipe from the starter; it closes however that one ends. (Read by its number: Python's own
    reader has a lock, and a forked worker would never see it freed.)"""

    def wait_for_the_end() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
