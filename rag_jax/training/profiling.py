"""A trace of a few steps by jax.profiler, for XProf, TensorBoard or Perfetto."""

import contextlib
import pathlib
from typing import Any

import jax

from rag_jax import hosts


class Profiler(contextlib.AbstractContextManager):
    """Traces some steps of a loop; the trace is written even where the loop ends early.

    Args:
      folder: where the trace is written; each of several processes writes into a subfolder, as
        those of one host would give their files the same names.
      window: (steps of this process before the trace begins, steps in it); None = no trace. The
        first step of a process compiles.
      first: number of the first step of this process.
    """

    def __init__(self, folder: pathlib.Path, window: tuple[int, int] | None, first: int):
        alone = hosts.count() == 1
        self.folder, self.window = folder if alone else folder / str(hosts.index()), window
        self._begin = first + window[0] if window else None
        self._end = self._begin + window[1] if window else None
        self._state = "waiting" if window else "off"

    def __exit__(self, *exc_info) -> None:
        if self._state == "tracing":
            self._stop()
        elif self._state == "waiting":
            hosts.say(f"no step was profiled: training ended within {self.window[0]} steps")

    def begin(self, step: int) -> None:
        """To be called before every step."""
        if step == self._begin:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # else it takes half a minute to stop
            jax.profiler.start_trace(self.folder, profiler_options=options)
            self._state = "tracing"

    def end(self, step: int, result: Any) -> None:
        """To be called after every step, with arrays that it computes."""
        if self._state == "tracing" and step + 1 == self._end:
            jax.block_until_ready(result)
            self._stop()

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._state = "off"
        hosts.say(f"the profile of steps from {self._begin} on is in {self.folder}")
