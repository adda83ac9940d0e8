"""The table at the end of a run, and report.json."""

import contextlib
import dataclasses
import platform
import resource
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from rag_jax import files, hosts, paper, scoring
from rag_jax.config import overrides
from rag_jax.data import order
from rag_jax.documents import workdir as ingested
from rag_jax.errors import UserError
from rag_jax.evaluation import Evaluation, retrieval_metrics, write_evaluation
from rag_jax.metrics import bootstrap
from rag_jax.models.stack import unstack_layers
from rag_jax.retrieval.index import PassageIndex
from rag_jax.text_table import print_table
from rag_jax.training import indexing, pretrained, workdir
from rag_jax.training.job import Index, Job
from rag_jax.training.opened import Rag
from rag_jax.training.warm_up import WarmTowers
from rag_jax.types import Params
from rag_jax.visible import command, shown_path

LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy", "scann")


class _Reporter:
    """Evaluates runs on the test split, or dev where there is none; one model in RAM at a time."""

    def __init__(self, job: Job, indexes: dict[str, PassageIndex]):
        self.job, self.indexes = job, indexes
        self.split = "test" if "test" in job.prepared.splits else "dev"
        self.metrics: dict[str, dict[str, float]] = {}  # of runs, shuffled passages, hot-swap
        self.shares: dict[str, dict[str, np.ndarray]] = {}  # `_shares` of runs
        self._opened: Rag | None = None  # the last run that was asked for, without an index
        self._indexes: Mapping[str, Index] = {}  # of that run, by name

    def rag(self, run: str, index: str | None = None) -> Rag:
        """A run, opened with the `config.eval` of the last command that trained it.

        index: the name of the index that it reads; None = the one that it trained with.
        """
        if self._opened is None or self._opened.run != run:
            self._opened = None
            job = self.job.of_run(run)
            self._indexes = indexing.indexes_of(job, run, self.indexes)
            params, _ = pretrained.load_params(job, run)
            job = job.of_run(run, workdir.eval_of(job.workdir, run))
            self._opened = Rag(job, run, params, None)
        if not self._opened.config.retrieval.k:
            return self._opened
        return dataclasses.replace(
            self._opened, index=self._indexes[index or self.job.trains_with])

    def evaluate(self, run: str) -> None:
        result = self.rag(run).evaluate(self.split, overlap=False)
        if hosts.leads():
            write_evaluation(self.job.workdir / run / "evaluation" / self.split, result)
        self.metrics[run], self.shares[run] = result.metrics, _shares(result)

    def shuffle(self, run: str) -> None:
        """Evaluates with the passages of other questions: what is lost, answers owe to reading."""
        count = len(self.job.prepared.splits[self.split])
        self.metrics["shuffled"] = self.rag(run).evaluate(
            self.split, order=someone_elses(count, self.job.config.seed), overlap=False).metrics

    def frozen_recall(self, run: str, warm: Params) -> dict[str, float]:
        """The retrieval metrics of the query encoder as it was before the run.

        warm: its parameters then, by name of the tower.
        """
        rag = self.rag(run)
        index = indexing.with_words(rag.job, self.indexes[self.job.trains_with])
        rag = dataclasses.replace(rag, index=index)
        answerer, questions = rag.answerer(), self.job.tokens(self.split)
        return retrieval_metrics(answerer, questions,
                                 answerer.retrieve(unstack_layers(warm), questions))


def someone_elses(count: int, seed: int) -> np.ndarray:
    """A permutation int[count]: for every question another one, whose passages it reads."""
    rng = order.generator(seed, 5)
    # A random cyclic shift leaves no question with its own passages.
    shift = int(rng.integers(1, count))
    drawn = rng.permutation(count)
    return drawn[(np.argsort(drawn) + shift) % count]


def evaluate_runs(job: Job, indexes: dict[str, PassageIndex], warm: WarmTowers
                  ) -> dict[str, Any]:
    """Evaluates every run, and the first RAG run with shuffled passages and swapped indexes."""
    reporter = _Reporter(job, indexes)
    for run in job.config.runs:
        reporter.evaluate(run)
    report: dict[str, Any] = {"split": reporter.split, "metrics": reporter.metrics}
    rag_runs = [run for run in job.config.runs
                if run in ("rag_token", "rag_sequence", "fid", "fid_joint")
                and overrides.for_run(job.config, run).retrieval.k]
    if rag_runs:
        if len(job.prepared.splits[reporter.split]) > 1:  # a single question has no partner
            reporter.shuffle(rag_runs[0])
        first = overrides.for_run(job.config, rag_runs[0])
        if indexes and first.train.steps and overrides.trains_query_encoder(first):
            try:
                before = warm.params(("query_encoder",))
            except (UserError, OSError) as error:  # its source may have gone or changed meanwhile
                hosts.say(f"the recall of the frozen query encoder is left out: {error}")
            else:
                report |= _recall(reporter, rag_runs[0], before)
    report["above_frozen"] = _above_frozen(reporter.shares)
    report["em"] = {name: metrics["em"] for name, metrics in reporter.metrics.items()}
    editions = {"2016", "2018"} <= set(job.prepared.stores)
    if rag_runs and editions and "leaders_2016" in job.prepared.splits:  # countries' own questions
        report["hot_swap"] = _hot_swap(reporter, rag_runs[0])
    report["index"] = {name: i.manifest["recall"] for name, i in indexes.items()}
    return report


def write_report(job: Job, results: dict[str, Any], secs: dict[str, float]
                 ) -> dict[str, Any]:
    """Adds time, memory, seed and versions, writes WORKDIR/report.json and prints the table.

    Args:
      job: of the run.
      results: from `evaluate_runs`.
      secs: seconds by stage, over all commands.
    """
    report = {
        **results,
        "wall_secs": round(sum(secs.values()), 1),
        "stage_secs": {name: round(value, 1) for name, value in secs.items()},
        "peak_rss_gib": round(_peak_rss_gib(), 3),
        "seed": job.config.seed,
        "versions": _versions(),
    }
    if hosts.leads():
        files.write_json(job.workdir / "report.json", report)
        print(f"{format_report(report)}\n\n{next_command(job)}", flush=True)
    return report


def next_command(job: Job) -> str:
    """A question to ask the first run, as a command line from the current folder."""
    splits = job.prepared.splits
    asked = next(splits[name][0] for name in ("leaders_2018", "test", "dev") if name in splits)
    which = ["--workdir", shown_path(job.workdir), "--run", job.config.runs[0]]
    if job.workdir.name == ingested.TRAINED and ingested.exists(job.workdir.parent):
        which = ["--workdir", shown_path(job.workdir.parent)]  # it has the current documents
    return f"Next, ask it:\n  {command('rag_jax.generate', *which, asked.question)}"


def _shares(result: Evaluation) -> dict[str, np.ndarray]:
    """By metric, float64[Q]: 100 for each question that counts as right, else 0; {} where the
    answers are not known."""
    if None in result.correct:
        return {}
    ranks = scoring.answer_ranks(result.examples, [a.passages for a in result.answers])
    return {"EM": 100.0 * np.array(result.correct), "answer recall@1": 100.0 * (ranks == 0)}


def _above_frozen(shares: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    """What training the retriever adds to each run, compared with the same run with a frozen one:
    the mean difference over the questions, with its 95 % interval."""
    added = {}
    for run, frozen in paper.FROZEN.items():
        for what in shares.get(run, {}) if shares.get(frozen) else ():
            values = shares[run][what] - shares[frozen][what]
            low, high = bootstrap.interval(values)
            added[f"{what}, {run} above {frozen}"] = {
                "points": float(values.mean()), "ci_low": low, "ci_high": high}
    return added


def _recall(reporter: _Reporter, run: str, warm: Params) -> dict[str, dict[str, float]]:
    """Answer recall at 5, or at the largest k below it, of the query encoder trained and frozen."""
    frozen = reporter.frozen_recall(run, warm)
    depths = [int(name.partition("@")[2]) for name in frozen if name.startswith("answer_recall@")]
    depth = 5 if 5 in depths else max(depths)
    name = f"answer_recall@{depth}"
    return {f"recall_at_{depth}": {
        "trained": reporter.metrics[run][name], "frozen": frozen[name]}}


def _hot_swap(reporter: _Reporter, run: str) -> dict[str, float]:
    """Exact match with each index on the questions of each year."""
    matrix = {}
    for index in ("2016", "2018"):
        rag = reporter.rag(run, index)
        for leaders in ("2016", "2018"):
            result = rag.evaluate(f"leaders_{leaders}", likelihood=False, overlap=False)
            cell = f"index{index}_leaders{leaders}"
            reporter.metrics[cell], matrix[cell] = result.metrics, result.metrics["em"]
    return matrix


def _peak_rss_gib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def _versions() -> dict[str, str]:
    import rag_jax

    versions = {"rag_jax": rag_jax.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(ModuleNotFoundError):  # scann has no wheel everywhere
            versions[name] = version(name)
    return versions


def _with_interval(percent: float, metrics: Mapping[str, float]) -> str:
    """A percentage of questions, with its 95 % interval."""
    count = int(metrics["count"])
    low, high = (metrics["em_ci_low"], metrics["em_ci_high"]) if "em" in metrics else (
        bootstrap.interval(100.0 * (np.arange(count) < round(count * percent / 100))))
    return f"{percent:.1f} ({low:.1f} to {high:.1f})"


def format_report(report: dict[str, Any]) -> str:
    """The final table: our figures beside the nearest ones of the paper, each with its setting."""
    hot_swap = report.get("hot_swap", {})
    metrics, split, run = report["metrics"], report["split"], next(iter(report["em"]))
    counts = {name: int(of["count"]) for name, of in metrics.items()}
    rows = [[f"EM, {name}", _with_interval(em, metrics[name]), paper.BESIDE_EM.get(name, "-")]
            for name, em in report["em"].items()]
    for key in (key for key in report if key.startswith("recall_at_")):
        depth = key.removeprefix("recall_at_")
        rows += [[f"answer recall@{depth}, {name} query encoder",
                  _with_interval(value, {"count": counts[run]}),
                  paper.BESIDE_RECALL[name] if depth == "5" else "-"]
                 for name, value in report[key].items()]
    for name, value in hot_swap.items():
        memory, leaders = name.replace("index", "").split("_leaders")
        rows.append([f"hot-swap, {memory} index, {leaders} leaders",
                     _with_interval(value, metrics[name]), paper.BESIDE_HOT_SWAP[name]])
    for name, added in report.get("above_frozen", {}).items():
        points, low, high = (f"{added[key]:+.1f}" for key in ("points", "ci_low", "ci_high"))
        rows.append([name, f"{points} ({low} to {high})", paper.BESIDE_ADDED.get(name, "-")])
    table = print_table(rows, [f"{split} (percent)", "here", "the paper's, of what"])
    table += f"\nIn brackets: 95 % bootstrap intervals over the {counts[run]} {split} questions"
    if hot_swap:
        table += f", of the hot-swap over {counts[next(iter(hot_swap))]} leaders"
    stages_line = ", ".join(f"{name} {secs:.0f}" for name, secs in report["stage_secs"].items())
    return (f"\n{table}\n\nwall {report['wall_secs']:.0f} s (seconds: {stages_line}), peak memory "
            f"{report['peak_rss_gib']:.2f} GiB, seed {report['seed']}")
