"""The paper's tables and figures, each a function of a lab to a section of the report.

Cells of tables are "ours / the paper's"; what was not measured is "not run", what the paper has
not is "-".
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

from rag_jax import files, paper
from rag_jax.paper import COLUMNS, OURS
from rag_jax.reproduction import pairwise as pairs
from rag_jax.reproduction import plots
from rag_jax.reproduction.cells import Cell, Measured, Measurement
from rag_jax.reproduction.estimates import (
    Estimate,
    distinct_trigrams,
    estimate,
    metric_of,
    share,
)
from rag_jax.reproduction.lab import Lab, measured
from rag_jax.reproduction.provenance import made_by, stale
from rag_jax.reproduction.sections import NOT_RUN, Plot, Section, Table

SYSTEMS = {**OURS, "SotA": "state of the art", "gold": "references"}
MISSED = "em_answer_not_retrieved", "answer_not_retrieved_count"
ONE_STEP = {"rag_sequence": "rag_token", "frozen_sequence": "frozen", "bm25_sequence": "bm25"}
OVERLAPS = {"answer_overlap": "answer known", "no_answer_overlap": "answer not known",
            "question_overlap": "question known", "no_question_overlap": "question not known"}
LEARNED = ("rag_token", "rag_sequence")  # the paper's rows of a retriever that trains
WIKI_DEV = "task:trivia_qa:wiki_dev"  # the answers of TriviaQA's Wikipedia test set are hidden
MARKS = ("In brackets after a number of ours: dev = of the development set, as the test answers "
         "are not public, so not to be compared with the paper's; k = 1 and frozen retriever = the "
         "model was trained on one passage a question, or with the retriever as it was warmed up; "
         "of RAG-Token = a RAG-Sequence that spells its labels was not trained.")
GENERATION = ("msmarco", "jeopardy")
CONTROLS = 20  # control items on a sheet


def shown(value: float | Estimate | None, missing: str = NOT_RUN) -> str:
    if value is None:
        return missing
    return str(value) if isinstance(value, Estimate) else f"{value:.1f}"


def _column(name: str) -> str:
    return " ".join(COLUMNS[part] for part in name.split("."))


def _notes(name: str) -> list[str]:
    return [f"On the paper: {note}" for note in paper.NOTES.get(name, ())]


def _asked(lab: Lab, column: str, run: str, what: Measurement
           ) -> tuple[list[Cell], Measurement, list[str]]:
    """The cells (seeds) of a column's task, what to ask them, and how that differs from the paper.

    No cells where the run or the task is not there.
    """
    task = column.split(".")[0]
    merged = task.startswith("fever") and run in ONE_STEP
    run = ONE_STEP[run] if merged else run
    cells, marks = lab.scale.cells(task, run), []
    if not cells:
        return [], what, marks
    # A class of either head is one step, of which both kinds of RAG are the same; a label that is
    # spelt is several.
    marks += ["of RAG-Token"] * (merged and not cells[0].config.classes)
    if task == "tqa_wiki":
        public = what._replace(split=WIKI_DEV)
    else:
        public = cells[0].public(what)
    marks += ["dev"] * (public != what)
    config = cells[0].running
    marks += ["k = 1"] * (config.retrieval.k == 1)
    frozen = config.train.query_encoder_rate is None
    marks += ["frozen retriever"] * (run in LEARNED and frozen)
    return cells, public, marks


def _results(lab: Lab, column: str, run: str, what: Measurement) -> list[Measured]:
    """Of all seeds of a cell; on dev, where the answers of the test set are not public."""
    cells, what, _ = _asked(lab, column, run, what)
    return measured(lab, cells, what)


def _marked_value(lab: Lab, column: str, run: str, what: Measurement, value: str) -> str:
    """A number with what a reader must know of it, if anything: "71.2 [..] (dev)"."""
    marks = _asked(lab, column, run, what)[2] if value != NOT_RUN else []
    return f"{value} ({', '.join(marks)})" if marks else value


def _scored(lab: Lab, table: Mapping[str, Mapping[str, float]], extra: Sequence[str],
            what: Measurement) -> Table:
    """A table of the paper with our numbers in it; `extra` are rows that it has not."""
    columns = list(table["rag_token"])

    def cell(row: str, column: str) -> str:
        published = shown(table.get(row, {}).get(column), "-")
        if row not in OURS:
            return published
        ours = shown(estimate(_results(lab, column, row, what), metric_of(column)))
        return f"{_marked_value(lab, column, row, what, ours)} / {published}"

    rows = [[SYSTEMS.get(row, row), *(cell(row, column) for column in columns)]
            for row in (*extra, *table)]
    return Table(["ours / paper's", *map(_column, columns)], rows)


def table1(lab: Lab) -> Section:
    """Open-domain question answering, test EM."""
    scored = _scored(lab, paper.TABLE1, ["closed_book"], Measurement())
    parts: list = ["Exact match on the test questions, percent.", scored, MARKS]
    asked = {run: _results(lab, "nq.em", run, Measurement()) for run in ("closed_book", *LEARNED)}
    for run in LEARNED:
        if asked[run] and len(asked[run]) == len(asked["closed_book"]):
            gain = estimate(asked[run], "em", minus=asked["closed_book"])
            parts.append(f"{SYSTEMS[run]} above the closed book: {gain} points.")
    rows = [[SYSTEMS[run], f"{shown(_share(asked[run], *MISSED))} / "
             f"{paper.ANSWER_IN_NO_PASSAGE if run == 'rag_token' else '-'}"] for run in LEARNED]
    parts += ["Exact match on those questions whose answer is in no passage retrieved (the paper "
              "does not say which of its models it is of).",
              Table(["ours / paper's", "NQ EM"], rows)]
    rows = [[SYSTEMS[run], *(shown(_share(found, f"em_{part}", f"em_{part}_count"))
                             for part in OVERLAPS)] for run, found in asked.items()]
    parts += ["Not in the paper: exact match on the questions with, and without, an answer of the "
              "training set, and on those that are, and are not, in it themselves.",
              Table(["ours, NQ EM", *OVERLAPS.values()], rows)]
    return Section("Table 1: open-domain question answering", [*parts, *_notes("table1")])


def table2(lab: Lab) -> Section:
    """Generation and fact verification, test."""
    return Section("Table 2: generation and fact verification", [
        "Test, percent.", _scored(lab, paper.TABLE2, [], Measurement()), MARKS,
        *_notes("table2")])


def table3(lab: Lab) -> Section:
    """Example generations."""
    systems = ("closed_book", "rag_token", "rag_sequence")
    header = ["task", "input", *(SYSTEMS[run] for run in systems)]
    rows = []
    for task in GENERATION:
        found = [_results(lab, task, run, Measurement()) for run in systems]
        records = [{r["id"]: r for r in results[0].predictions} if results else {}
                   for results in found]
        asked = next((list(of.values())[:: max(len(of) // 3, 1)][:3] for of in records if of), [])
        rows += [[COLUMNS[task], one["question"], *(
            _marked(of[one["id"]]) if of else NOT_RUN for of in records)] for one in asked]
    ours = Table(header, rows) if rows else NOT_RUN
    published = Table(header, [[COLUMNS[task], *cells] for task, *cells in paper.TABLE3])
    return Section("Table 3: example generations", [
        "Ours, inputs at equal distances in the test split (dev, where the test answers are not "
        "public); ≠ marks what equals no reference.",
        ours, "The paper's; ? is factually wrong, * partly right.", published])


def _marked(record: Mapping) -> str:
    return record["answer"] if record["exact_match"] else f"≠ {record['answer']}"


def table5(lab: Lab) -> Section:
    """Distinct over total tri-grams."""
    columns = ["msmarco.distinct", "jeopardy.distinct"]
    rows = []
    for row, published in paper.TABLE5.items():
        cells = []
        for column in columns:
            run = "rag_token" if row == "gold" else row
            found = _results(lab, column, run, Measurement())
            texts = [[r["references"][0] if row == "gold" else r["answer"]
                      for r in result.predictions] for result in found[:1]]
            ours = distinct_trigrams(texts[0]) if texts else None
            value = _marked_value(lab, column, run, Measurement(), shown(ours))
            cells.append(f"{value} / {shown(published[column])}")
        rows.append([SYSTEMS[row], *cells])
    return Section("Table 5: diversity", [
        "Distinct tri-grams over all tri-grams of the test outputs, percent, of the first seed. "
        "The ratio falls with the number of outputs: compare within a column.",
        Table(["ours / paper's", *map(_column, columns)], rows), MARKS, *_notes("table5")])


def table6(lab: Lab) -> Section:
    """Ablations of the retriever, dev."""
    parts: list = ["Dev, percent.", _scored(lab, paper.TABLE6, [], Measurement("dev")), MARKS]
    rows = []
    for run in LEARNED:
        found = _results(lab, "nq.em", run, Measurement("dev", shuffled=True))
        rows.append([f"{SYSTEMS[run]}, passages of another question",
                     shown(estimate(found, "em"))])
    parts += ["Not in the paper: every question reads the passages of another one.",
              Table(["ours", "NQ EM"], rows)]
    return Section("Table 6: ablations", [*parts, *_notes("table6")])


def figure2(lab: Lab) -> Section:
    """Which passage gave which token."""
    maps = {'paper, "Hemingway" (relative)': (
        paper.FIGURE2_TOKENS, [f"Doc {i}" for i in range(1, 6)], paper.FIGURE2)}
    parts: list = []
    cells = lab.scale.cells("jeopardy", "rag_token")[:1]
    found = [lab.explain(cell, lab.scale.subject) for cell in cells]
    if found and found[0]:
        one = found[0]
        rows = list(zip(*one.posterior, strict=True))  # -> [K][T]
        maps = {f'ours, "{one.question}"': (one.tokens, one.passages, rows), **maps}
        parts = [f"Input: {one.question}. Output: {one.answer}",
                 Table(["passage", "text"], list(zip(one.passages, one.texts, strict=True)))]
    else:
        parts = [f"Ours: {NOT_RUN}."]
    plot = Plot("figure2", "p(passage | token) of RAG-Token, ours and the paper's.",
                plots.heat_maps(maps))
    return Section("Figure 2: document posterior per token", [*parts, plot, *_notes("figure2")])


def partial_decoding(lab: Lab) -> Section:
    """The beginning of a title, completed by the generator without passages (section 4.2)."""
    rows, maps, p = [], {}, "p(token | those before)"
    cells = lab.scale.cells("jeopardy", "closed_book")[:1]
    for beginning in lab.scale.beginnings:
        found = next((lab.complete(cell, beginning) for cell in cells), None)
        answer, completed = NOT_RUN, NOT_RUN
        if found is not None:
            answer, completed = found.answer, "yes" if beginning.title in found.answer else "no"
            if found.tokens:
                maps[f'ours, "{beginning.subject}": {beginning.text}'] = (
                    found.tokens, [p], [found.p])
        rows.append([beginning.subject, beginning.text, answer, beginning.title, beginning.about,
                     completed])
    header = ["input", "given", "completed by BART, closed book"]
    parts: list = [
        "The document posterior flattens after the first word of a title (figure 2), so the "
        "generator may know the rest by itself: BART without passages goes on from the beginning.",
        Table([*header, "title", "which is", "title completed"], rows)]
    if maps:
        parts.append(Plot("partial_decoding", "How sure the generator alone is of each token that "
                          "it adds.", plots.heat_maps(maps)))
    parts += ["The paper's.", Table(header, paper.PARTIAL_DECODING)]
    return Section("Partial decoding: titles that the generator knows",
                   [*parts, *_notes("partial_decoding")])


def figure3(lab: Lab) -> Section:
    """Scores and recall by the number of passages, dev."""
    figures, rows = [], []
    for column, published in paper.FIGURE3.items():
        ours = {}
        for run, points in published.items():
            found = _points(lab, column, run)
            if found:
                ours[SYSTEMS[run]] = {k: point.value for k, point in found.items()}
            rows += [[column, SYSTEMS[run], str(k), shown(found.get(k)), shown(points.get(k), "-")]
                     for k in lab.scale.ks]
        theirs = {SYSTEMS[run]: points for run, points in published.items()}
        picture = plots.curves({f"ours: {column}": ours, f"paper: {column}": theirs}, "percent")
        figures.append(Plot(f"figure3-{column}", f"{column} by passages per question, dev, ours "
                            "and the paper's.", picture))
    table = Table(["figure", "system", "K", "ours", "paper's"], rows)
    return Section("Figure 3: number of passages", [*figures, table, *_notes("figure3")])


def _points(lab: Lab, column: str, run: str) -> dict[int, Estimate]:
    """By number of passages, those that are measured."""
    found = {k: _results(lab, column, run, Measurement("dev", k=k)) for k in lab.scale.ks}
    if column.endswith("recall"):
        points = {k: _share(results, f"answer_recall@{k}") for k, results in found.items()}
    else:
        points = {k: estimate(results, metric_of(column)) for k, results in found.items()}
    return {k: point for k, point in points.items() if point is not None}


def _share(results: Sequence[Measured], name: str, count: str = "count") -> Estimate | None:
    """A metric that is a share of `count` questions; over those seeds that have it."""
    known = [result.metrics for result in results if name in result.metrics]
    return share([m[name] for m in known], int(known[0][count])) if known else None


def hot_swap(lab: Lab) -> Section:
    """The memory of one year, asked for the leaders of another."""
    rows, same = [], []
    for memory in ("2016", "2018"):
        for leaders in ("2016", "2018"):
            what = Measurement(f"leaders_{leaders}", memory=memory)
            found = _results(lab, "nq.em", "rag_token", what)
            published = paper.HOT_SWAP[f"index{memory}_leaders{leaders}"]
            rows.append([memory, leaders,
                         f"{shown(estimate(found, 'em'))} / {shown(published)}"])
            if leaders == "2018" and found:
                same.append([r["answer"] for result in found for r in result.predictions])
    share = None
    if len(same) == 2:
        share = 100 * sum(a == b for a, b in zip(*same, strict=True)) / len(same[0])
    return Section("Index hot-swapping", [
        "Exact match on leaders of offices that changed hands, RAG-Token, percent; nothing is "
        "trained in between.",
        Table(["index", "leaders", "ours / paper's"], rows),
        f"The same answer from both indexes: {shown(share)} / {shown(paper.HOT_SWAP_SAME)} percent "
        "(v1 of the paper).", *_notes("hot_swap")])


def fever_overlap(lab: Lab) -> Section:
    """Claims with a gold article among the first passages."""
    results = _results(lab, "fever3", "rag_token", Measurement(k=10))
    rows = [[f"top {k}", f"{shown(_share(results, f'title_overlap@{k}', 'titled_count'))} / "
             f"{shown(published)}"] for k, published in paper.FEVER_OVERLAP.items()]
    return Section("FEVER: retrieval of gold articles", [
        "Claims with a gold article's title among the first passages, percent of those that have "
        "one.",
        Table(["passages", "ours / paper's"], rows)])


def pairwise(lab: Lab) -> Section:
    """Sheets for human judges."""
    folder = lab.root / "pairwise"
    systems = [cell for run in ("closed_book", "rag_token")
               for cell in lab.scale.cells("jeopardy", run)[:1]]
    there = _sheets_there(lab, folder, systems)
    found = measured(lab, systems, Measurement())
    parts: list = []
    if len(found) == 2:
        closed, ours = found
        items = [pairs.Pair(a["question"], a["answer"], b["answer"]) for a, b in zip(
            closed.predictions, ours.predictions, strict=True)][: paper.TABLE4_PAIRS]
        gold = [(r["question"], r["references"][0]) for r in ours.predictions]
        # A true sentence about the subject against a true one about something else.
        controls = [pairs.Pair(subject, text, other) for (subject, text), (_, other) in zip(
            gold, gold[1:] + gold[:1], strict=True) if text != other][:CONTROLS]
        if not there:
            pairs.write(folder, items, controls, seed=0)
            files.write_text(folder / "made.json", json.dumps(
                [made_by(cell, lab.root) for cell in systems], indent=1))
        parts.append(f"Sheets for judges: {folder}/sheet.html and sheet.csv, {len(items)} pairs "
                     f"and {len(controls)} control items; key.json stays with you. "
                     "--tally FILE.csv ... counts the filled-in ones.")
    else:
        parts.append(f"Sheets: {NOT_RUN}.")
    tallied = pairs.read_tally(folder)
    names = {"first": "BART better", "second": "RAG-Token better", "both": "both good",
             "neither": "both poor", "no_majority": "no majority"}
    rows = [[names[outcome], *(
        f"{shown(tallied.shares[q][outcome] if tallied else None)} / {shown(published[q])}"
        for q in pairs.QUESTIONS)] for outcome, published in paper.TABLE4.items()]
    parts.append(Table(["ours / paper's", *pairs.QUESTIONS], rows))
    if tallied:
        parts.append(f"{tallied.pairs} pairs, {len(tallied.kept)} annotators; dropped by control "
                     f"items: {', '.join(tallied.dropped) or 'nobody'}.")
    return Section("Table 4: human evaluation", [*parts, *_notes("table4")])


def _sheets_there(lab: Lab, folder: pathlib.Path, systems: Sequence[Cell]) -> bool:
    """Whether there are sheets of these systems; those of others are put aside with their tally."""
    if not (folder / "key.json").exists():
        return False
    record = folder / "made.json"
    made = json.loads(record.read_text("utf-8")) if record.exists() else [None] * len(systems)
    why = next(filter(None, (stale(*pair, lab.root) for pair in zip(made, systems, strict=True))),
               "")
    if why:
        kept = files.set_aside(folder, "earlier")  # judges may have them
        lab.refused["pairwise"] = f"{why}; the sheets are in {kept} now"
    return not why


EXPERIMENTS: dict[str, Callable[[Lab], Section]] = {
    "table1": table1, "table2": table2, "table3": table3, "pairwise": pairwise, "table5": table5,
    "table6": table6, "figure2": figure2, "partial_decoding": partial_decoding, "figure3": figure3,
    "hot_swap": hot_swap, "fever_overlap": fever_overlap,
}
