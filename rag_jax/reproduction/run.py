"""Runs experiments and writes the one report of a workdir."""

import pathlib
import platform
import subprocess
from collections.abc import Sequence

import jax

import rag_jax
from rag_jax.reproduction import sections
from rag_jax.reproduction.cells import Cell, Measurement, Scale
from rag_jax.reproduction.experiments import EXPERIMENTS
from rag_jax.reproduction.lab import Lab
from rag_jax.reproduction.sections import Section, Table
from rag_jax.reproduction.worker import Worker

ROOT = pathlib.Path(__file__).parents[2]


def reproduce(names: Sequence[str], root: pathlib.Path, scale: Scale, work: bool) -> None:
    """Trains and measures what the named experiments lack, and writes ROOT/report.md and .html.

    The report has all experiments: of those that are not named, what was measured before.

    Args:
      names: of EXPERIMENTS.
      root: the folder of everything.
      scale: of data and models.
      work: False trains and measures nothing.
    """
    root.mkdir(parents=True, exist_ok=True)
    # Cells of one size are the same programs: they compile once.
    jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    worker, folder = Worker(root), None
    for cell, what in missing(names, root, scale) if work else ():
        if folder not in (None, cell.folder):
            write_report(root, scale)
        folder = cell.folder
        (worker.explain if isinstance(what, str) else worker.measure)(cell, what)
    write_report(root, scale)
    print(f"{root / 'report.md'}, {root / 'report.html'}", flush=True)


def write_report(root: pathlib.Path, scale: Scale) -> None:
    """The report on what is on disk."""
    lab = Lab(root, scale)
    found = [experiment(lab) for experiment in EXPERIMENTS.values()]
    sections.write(root, f"The paper's tables and figures, {scale.name} scale",
                   [_head(lab), *found])


def missing(names: Sequence[str], root: pathlib.Path, scale: Scale
            ) -> list[tuple[Cell, Measurement | str]]:
    """What the named experiments would measure, or explain; folder by folder, run by run."""
    lab = Lab(root, scale)
    for name in names:
        EXPERIMENTS[name](lab)
    order: dict[str, int] = {}
    for cell, _ in lab.missing:
        order.setdefault(cell.folder, len(order))
    wanted = {(cell.folder, cell.run, what): cell for cell, what in lab.missing}
    return [(cell, what) for (_, _, what), cell in sorted(
        wanted.items(), key=lambda item: (order[item[0][0]], item[0][1]))]


def _head(lab: Lab) -> Section:
    rows = [[f"{folder}/{run}", str(cell.config.seed), str(cell.config.train.steps),
             f"{folder}/config.json"] for (folder, run), cell in sorted(lab.used.items())]
    trained = Table(["model", "seed", "steps", "config"], rows) if rows else sections.NOT_RUN
    return Section("What this is", [
        f"Scale: {lab.scale.about}.",
        'Every number is "ours / the paper\'s", on different data and models unless the scale is '
        'the paper\'s; "not run" = not measured here, "-" = not in the paper. Brackets: 95 % '
        "bootstrap over seeds and questions (few seeds: rather too narrow than too wide).",
        f"rag_jax {_commit()}, Python {platform.python_version()}, {platform.machine()}.",
        "Models measured:", trained])


def _commit() -> str:
    """The commit of this checkout, or the version where there is none."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True,
                              check=True).stdout.strip()

    try:
        if pathlib.Path(git("rev-parse", "--show-toplevel")) != ROOT:
            return rag_jax.__version__  # installed inside another repository
        changed = " with changes" if git("status", "--porcelain", "-uno") else ""
        return f"commit {git('rev-parse', 'HEAD')}{changed}"
    except (OSError, subprocess.CalledProcessError):
        return rag_jax.__version__
