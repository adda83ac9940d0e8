"""Steps: the folders of a stage's checkpoints, named by how many training steps were finished, and
the note of where a stage stopped."""

import os
import pathlib
import re

from rag_jax import hosts
from rag_jax.retrieval.json_files import read_sealed, write_sealed


def _step_of(name: str) -> int | None:
    """The number of finished steps that a checkpoint's folder is named by; None = it is no name
    that we give: it has a leading zero, or digits other than 0 to 9."""
    return int(name) if re.fullmatch("0|[1-9][0-9]*", name) else None


def steps_in(folder: pathlib.Path) -> list[int]:
    """The steps of which a folder has folders of checkpoints, ascending, damaged and empty ones
    too; [] where it does not exist.

    Raises:
      OSError: it cannot be read; a glob would give [], so that training would begin again.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(step for entry in entries
                          if (step := _step_of(entry.name)) is not None and entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):  # it may be removed meanwhile
        return []


def stages_in(workdir: pathlib.Path) -> set[str]:
    """The folders in a workdir that have checkpoints, without those that cannot be read."""
    return {path.parent.name for path in workdir.glob("*/*")  # an index may have a year's name
            if _step_of(path.name) is not None and not path.parent.name.startswith("indexes")}


def made_of_data(workdir: pathlib.Path) -> set[str]:
    """The folders in a workdir that hold what was made from its data: stages and indexes."""
    return stages_in(workdir) | {path.parent.name for path in workdir.glob("indexes*/[!.]*")
                                 if not path.parent.is_symlink()}


def last_step(folder: pathlib.Path) -> int | None:
    """The step of a stage's last checkpoint; None without one."""
    return max(steps_in(folder), default=None)


def has_checkpoint(folder: pathlib.Path) -> bool:
    """Whether a stage has one, be it of step 0."""
    return last_step(folder) is not None


def steps_taken(folder: pathlib.Path) -> int:
    """The step of a stage's last checkpoint; 0 without one."""
    return last_step(folder) or 0


def warn_of_unfinished(folder: pathlib.Path, steps: int, use: str = "",
                       taken: int | None = None) -> None:
    """Warns where a stage has begun and not taken all its steps.

    Args:
      folder: of the stage.
      steps: of all.
      use: what is made of it, or not, as it is.
      taken: the steps that it has taken; None = as its folder has it.
    """
    if taken is None:
        taken = last_step(folder)
    if taken is not None and taken < steps:
        hosts.warn(f"{folder}: has taken {taken} of {steps} steps{use}; to finish it, give the "
                   "command again that began it")


def stop(folder: pathlib.Path, step: int, why: str, checkpoint: int | None) -> None:
    """Records that a stage stopped at a step because a number became NaN or infinite.

    checkpoint: the step of its last checkpoint; None = it has none.
    """
    write_sealed(folder / "stopped.json",
                 {"step": step, "why": why, "checkpoint": checkpoint})


def has_stopped(folder: pathlib.Path) -> bool:
    """Whether `stop` was called for a stage that has saved no checkpoint since.

    Raises:
      RetrievalError: stopped.json is damaged.
    """
    file = folder / "stopped.json"
    if not file.is_file():
        return False
    kept = read_sealed(file).get("checkpoint")
    return last_step(folder) == kept
