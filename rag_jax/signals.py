"""The signals that stop a process."""

import signal

# Of a scheduler, and of a terminal that was closed, which Windows does not have.
ENDING = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
ALL = (*ENDING, signal.SIGINT)
