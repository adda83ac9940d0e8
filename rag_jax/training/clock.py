"""How long the stages of a workdir took."""

import contextlib
import pathlib
import time
from collections.abc import Iterator

from rag_jax import hosts, locks
from rag_jax.config import ConfigError
from rag_jax.errors import UserError
from rag_jax.retrieval.json_files import read_sealed, write_sealed


class Clock:
    """Seconds by stage, summed over all commands that ran on a workdir (seconds.json)."""

    def __init__(self, workdir: pathlib.Path):
        self._file = workdir / "seconds.json"
        self.secs: dict[str, float] = {}
        if self._file.exists():
            self.secs = read_sealed(self._file)
            if not all(isinstance(secs, float) for secs in self.secs.values()):
                raise ConfigError(f"{self._file} is damaged; remove it: it has times alone")

    @contextlib.contextmanager
    def time(self, name: str, anew: bool = False) -> Iterator[None]:
        """Adds the time of its body to stage `name`, also when the body is interrupted.

        anew: replace the stage's time instead, as the body repeats all of its work.

        Raises:
          UserError: the workdir was moved since this process locked it.
        """
        hosts.lead(lambda: locks.check_held(self._file.parent))
        hosts.say(f"== {name}")
        began, before = time.monotonic(), 0.0 if anew else self.secs.get(name, 0.0)

        def note() -> None:
            self.secs[name] = before + time.monotonic() - began
            if hosts.leads():
                write_sealed(self._file, self.secs)

        try:
            yield
        except BaseException:
            # Of a full disk, say, which the body has met, too; or the workdir was moved.
            with contextlib.suppress(OSError, UserError):
                locks.check_held(self._file.parent)
                note()
            raise
        note()
