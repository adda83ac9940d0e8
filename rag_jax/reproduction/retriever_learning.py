"""Experiments beyond the paper: what a retriever learns from answers, and by which objective."""

import contextlib
import json
from collections.abc import Sequence

from rag_jax import marginal
from rag_jax.reproduction import plots
from rag_jax.reproduction.cells import Cell, Measurement
from rag_jax.reproduction.estimates import estimate, paired, share_of
from rag_jax.reproduction.lab import Lab, measured
from rag_jax.reproduction.sections import NOT_RUN, Part, Plot, Table, beside, shown

# Exact match that Atlas (Izacard et al. 2022, arXiv 2208.03299) is quoted with on 64 examples of
# Natural Questions, by what its retriever was pre-trained with. Not checked against that paper.
ATLAS = {"fid": 39.9, "adist": 40.9, "loop": 41.8, "emdr2": 43.3, "pdist": 45.0}
LEARNERS = {"frozen": "RAG-Token, frozen retriever", "rag_token": "RAG-Token",
            "fid": "Fusion-in-Decoder, frozen retriever", "fid_joint": "Fusion-in-Decoder"}
LEARNT_FROM = ("marginal", *marginal.LEARNT_FROM)


def objectives(lab: Lab) -> list[Part]:
    """What the retriever learns from, from one that finds little, at equal compute."""
    rows, panels = [], {name: {} for name in ("RAG-Token", "Fusion-in-Decoder")}
    for run, model in LEARNERS.items():
        frozen_run = "fid" if run.startswith("fid") else "frozen"
        frozen = measured(lab, lab.scale.cells("objective_marginal", frozen_run), Measurement())
        learns = run != frozen_run
        for objective in LEARNT_FROM:
            cells = lab.scale.cells(f"objective_{objective}", run)
            if not cells:
                continue
            results = measured(lab, cells, Measurement())
            name = f"{model}, {objective}" if learns else model
            recalls = {k: share_of(results, f"answer_recall@{k}") for k in (1, 2, 3, 4, 5)}
            points = {k: one.value for k, one in recalls.items() if one is not None}
            if points:
                panels[model.split(",")[0]][name] = points
            gain = estimate(results, "em", minus=frozen) if learns else None
            rows.append([name, str(cells[0].config.train.steps), shown(recalls[1]),
                         shown(recalls[5]),
                         beside(estimate(results, "em"), ATLAS.get(run, ATLAS.get(objective))
                                if run.startswith("fid") else None),
                         shown(gain, NOT_RUN if learns else "-")])
    plot = [Plot("objectives", "Test questions with an answer among the first passages.",
                 plots.curves(panels))] if any(panels.values()) else []
    return ["Test, percent. A generator that reads already teaches a retriever of a short warm-up, "
            "and both train; both are the same for all. A step of RAG-Token costs the same with "
            "every objective; Fusion-in-Decoder does fewer steps where its objective reads the "
            "passages again.",
            Table(["ours / Atlas's", "steps", "answer recall@1", "answer recall@5",
                   "EM / on 64 examples of NQ", "EM above frozen"], rows) if rows else NOT_RUN,
            *plot, "Atlas's numbers are of another size, task and data, quoted and not checked "
            "against its paper."]


def learned_retrieval(lab: Lab) -> list[Part]:
    """Retrievers from poor to good, as the warm-up left them and as answers have trained them."""
    scores = {"answer_recall@1": "answer recall@1", "answer_recall@5": "answer recall@5",
              "em": "EM"}
    panels: dict[str, dict[str, dict[int, float]]] = {name: {} for name in scores.values()}
    rows, gains = [], []
    for start in lab.scale.starts:
        cells = {run: lab.scale.cells(f"start_{start}", run) for run in ("frozen", "rag_token")}
        frozen, trained = (measured(lab, of, Measurement()) for of in cells.values())
        row = [str(start)]
        for name in scores:
            ours = [estimate(seeds, "em") if name == "em" else share_of(seeds, name)
                    for seeds in (frozen, trained)]
            row += map(shown, ours)
        recall = "answer_recall@5"
        gained = [after.metrics[recall] - before.metrics[recall]
                  for after, before in zip(*paired(trained, frozen), strict=True)
                  if recall in after.metrics and recall in before.metrics]
        gains += gained
        rows.append([*row, ", ".join(f"{gain:+.1f}" for gain in gained) or NOT_RUN])
        for name, title in scores.items():
            if points := _while_training(lab, cells["rag_token"], f"dev/{name}"):
                panels[title][f"{start} steps"] = points
    header = ["warm-up, steps", *(f"{title}, {how}" for title in scores.values()
                                  for how in ("frozen", "trained")), "recall@5 gained, by seed"]
    plot = [Plot("learned_retrieval", "Dev, while answers train the retriever; mean of the seeds.",
                 plots.curves(panels, "steps"))] if any(panels.values()) else []
    harmed = sum(gain < -1 for gain in gains)
    return ["RAG-Token, test, percent. The warm-up of the retriever is cut short; what follows has "
            "questions and answers alone.", Table(header, rows) if rows else NOT_RUN, *plot,
            f"Runs that end more than a point of recall@5 below the frozen retriever: {harmed} of "
            f"{len(gains)}." if gains else NOT_RUN]


def _while_training(lab: Lab, cells: Sequence[Cell], name: str) -> dict[int, float]:
    """A metric of the evaluations while training, by step, mean over the seeds that have them and
    have been measured; others may be in training, or of another configuration."""
    points: dict[int, list[float]] = {}
    for cell in cells:
        if lab.result(cell, Measurement()) is None:
            continue
        file = lab.root / cell.folder / cell.run / "metrics.jsonl"
        for line in file.read_text("utf-8").splitlines() if file.exists() else ():
            with contextlib.suppress(ValueError):  # the last line of a killed run may be cut
                if name in (fields := json.loads(line)):
                    points.setdefault(fields["step"], []).append(fields[name])
    return {step: sum(values) / len(values) for step, values in sorted(points.items())}
