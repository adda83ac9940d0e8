"""Runs experiments and writes the one report of a workdir."""

import pathlib
import platform
import subprocess
from collections.abc import Sequence

import jax

import rag_jax
from rag_jax.reproduction import sections
from rag_jax.reproduction.cells import Cell, Scale
from rag_jax.reproduction.experiments import EXPERIMENTS
from rag_jax.reproduction.lab import Lab
from rag_jax.reproduction.sections import Section, Table

ROOT = pathlib.Path(__file__).parents[2]


def reproduce(names: Sequence[str], root: pathlib.Path, scale: Scale, work: bool) -> None:
    """Trains and measures what the named experiments lack, and writes ROOT/report.md and .html.

    The report has all experiments: of those that are not named, what was measured before. It is
    written anew after each of them.

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
    for name in names if work else ():
        EXPERIMENTS[name](Lab(root, scale, work=True))
        write_report(root, scale)
    write_report(root, scale)
    print(f"{root / 'report.md'}, {root / 'report.html'}", flush=True)


def write_report(root: pathlib.Path, scale: Scale) -> None:
    """The report on what is on disk."""
    lab = Lab(root, scale, work=False)
    found = [experiment(lab) for experiment in EXPERIMENTS.values()]
    sections.write(root, f"The paper's tables and figures, {scale.name} scale",
                   [_head(lab), *found])


def missing(names: Sequence[str], root: pathlib.Path, scale: Scale) -> list[Cell]:
    """Cells that the named experiments would train or measure."""
    lab = Lab(root, scale, work=False)
    for name in names:
        EXPERIMENTS[name](lab)
    return list(lab.missing.values())


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
