"""Runs experiments and writes the one report of a workdir."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence

from rag_jax import files, locks
from rag_jax.data.inputs import is_prepared
from rag_jax.data.task_sources import by_hand, task_of
from rag_jax.errors import DataError
from rag_jax.reproduction import pairwise, sections
from rag_jax.reproduction.cells import Asked, Cell, Scale
from rag_jax.reproduction.experiments import EXPERIMENTS, sheets_of_others
from rag_jax.reproduction.lab import Lab
from rag_jax.reproduction.sections import Section, Table
from rag_jax.reproduction.worker import Worker
from rag_jax.training.preemption import stopped_at_once

TITLE = "tables and figures"  # of every report


def reproduce(names: Sequence[str], root: pathlib.Path, scale: Scale, work: bool) -> None:
    """Trains and measures what the named experiments lack, and writes ROOT/report.md and .html.

    The report has all experiments: of those that are not named, what was measured before.

    Args:
      names: some of EXPERIMENTS.
      root: the folder of everything.
      scale: which cells there are.
      work: False trains and measures nothing.

    Raises:
      FolderError: ROOT has a report of another program.
      InUseError: another process works on ROOT, or on one of its workdirs.
      Preempted: a signal came; the same call goes on.
      DataError: everything is done except what needs files that have to be downloaded by hand.
    """
    _check_reports(root)
    with stopped_at_once(), locks.exclusive(root):
        worker, folder = Worker(root), None
        wanted = lacking(names, root, scale)[0] if work else []
        if work:  # damaged results of the others, too, end it now, not when these are trained
            lacking([name for name in EXPERIMENTS if name not in names], root, scale)
        absent = {cell.folder: why for cell, _ in wanted if (why := _absent(cell, root))}
        left_out = "\n".join(["left out, until the files are there:", *absent.values()])
        if absent:
            print(left_out, flush=True)  # now, and not when all else is trained
        for cell, what in wanted:
            if cell.folder in absent:
                continue
            if folder not in (None, cell.folder):
                write_report(root, scale)
            folder = cell.folder
            worker.work_out(cell, what)
        write_report(root, scale)
    print(f"{root / 'report.md'}, {root / 'report.html'}", flush=True)
    if absent:
        raise DataError(left_out)


def _check_reports(root: pathlib.Path) -> None:
    for path in (root / "report.md", root / "report.html"):
        if path.is_file() and TITLE not in path.read_text("utf-8", errors="replace"):
            raise files.FolderError(f"{path} is no report of rag_jax.reproduce, which would "
                                    "replace it; name another --workdir")


def _absent(cell: Cell, root: pathlib.Path) -> str:
    """The files that a cell's data need and no program can download; "" once it has its data."""
    data = cell.config.data
    sources = [source for source in (data.train, data.dev, data.test) if task_of(source)]
    return "" if is_prepared(root / cell.folder) else "\n".join(filter(None, (
        by_hand(source, data.data_dir) for source in sources)))


def write_report(root: pathlib.Path, scale: Scale) -> None:
    """Writes the report on the results on disk."""
    lab = Lab(root, scale)
    experiments = [section(lab) for section in EXPERIMENTS.values()]
    sections.write(root, f"The paper's {TITLE}, {scale.name} scale",
                   [_head(lab), *experiments])  # the head knows what the others asked for


def lacking(names: Sequence[str], root: pathlib.Path, scale: Scale
            ) -> tuple[list[tuple[Cell, Asked]], dict[str, str]]:
    """What the named experiments have to compute, folder by folder and run by run; and what they
    cannot measure on these data, with the reason."""
    lab = Lab(root, scale, writes=False)
    for name in names:
        EXPERIMENTS[name](lab)
    order: dict[str, int] = {}
    for cell, _ in lab.missing:
        order.setdefault(cell.folder, len(order))
    wanted = {(cell.folder, cell.run, what): cell for cell, what in lab.missing}
    missing = [(cell, what) for (_, _, what), cell in sorted(
        wanted.items(), key=lambda item: (order[item[0][0]], item[0][1]))]
    return missing, lab.unavailable


def tally(root: pathlib.Path, scale: Scale, sheets: Sequence[pathlib.Path]) -> None:
    """Counts the sheets that judges of the scale's systems have filled in, and keeps the result.

    Raises:
      DataError: the sheets below ROOT are of other systems; or as `pairwise.write_tally`.
      InUseError: another process works on ROOT.
    """
    with locks.exclusive(root):
        if others := sheets_of_others(root, scale):
            raise DataError(f"{root / 'pairwise'}: its sheets are of another configuration "
                            f"({others:.300}); give the same --scale, --reduced and --workdir")
        pairwise.write_tally(root / "pairwise", sheets)


def _head(lab: Lab) -> Section:
    programs = sorted({made["program"] for _, records in lab.used.values() for made in records})
    rows = [[f"{folder}/{run}", str(cell.config.seed), str(cell.config.train.steps),
             cell.reading, f"{folder}/config.json", _range(made["date"] for made in records),
             *_numbers(programs, records)]
            for (folder, run), (cell, records) in sorted(lab.used.items())]
    header = ["model", "seed", "steps", "trained on", "config", "measured on",
              *["by"] * (len(programs) > 1)]
    parts: list = [
        f"Scale: {lab.scale.about}.",
        'Every number is "ours / the paper\'s", on different data and models unless the scale is '
        'the paper\'s; "not run" = not measured here, "-" = not in the paper. Brackets: 95 % '
        "bootstrap over seeds and questions (few seeds: rather too narrow than too wide).",
        "Models measured:", Table(header, rows) if rows else sections.NOT_RUN]
    parts += [f"Measured by{f' ({number})' * (len(programs) > 1)}: {program}."
              for number, program in enumerate(programs, 1)]
    if lab.unavailable:
        parts += ["Cannot be measured on these data:", Table(
            ["result", "why"], sorted(lab.unavailable.items()))]
    if lab.refused:
        parts += ["On disk, but of another configuration, so not counted:", Table(
            ["result", "why"], sorted(lab.refused.items()))]
    return Section("What this is", parts)


def _range(dates: Iterable[str]) -> str:
    first, *_, last = sorted(dates) * 2
    return first if first == last else f"{first} to {last}"


def _numbers(programs: Sequence[str], records: Sequence[Mapping]) -> list[str]:
    """Which of several programs measured a model."""
    if len(programs) < 2:
        return []
    return [", ".join(str(programs.index(p) + 1) for p in sorted({r["program"] for r in records}))]
