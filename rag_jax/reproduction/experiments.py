"""The paper's tables and figures: what each asks of a lab, and the parts of its section.

Cells of tables are "ours / the paper's"; "not run" is not measured, "-" is not in the paper.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence

from rag_jax import files, paper
from rag_jax.config import overrides
from rag_jax.paper import COLUMNS, OURS
from rag_jax.reproduction import pairwise as pairs
from rag_jax.reproduction import plots, retriever_learning
from rag_jax.reproduction.cells import (
    Cell,
    Explained,
    Measured,
    Measurement,
    Question,
    Scale,
)
from rag_jax.reproduction.estimates import (
    Estimate,
    distinct_trigrams,
    estimate,
    metric_of,
    share_of,
)
from rag_jax.reproduction.lab import Lab, damaged_result_named, measured, read_json
from rag_jax.reproduction.provenance import made_by, stale
from rag_jax.reproduction.sections import (
    NOT_RUN,
    Part,
    Plot,
    Section,
    Table,
    beside,
    shown,
)

SYSTEMS = {**OURS, "SotA": "state of the art", "gold": "references"}
MISSED = "em_answer_not_retrieved", "answer_not_retrieved_count"
ONE_STEP = {"rag_sequence": "rag_token", "frozen_sequence": "frozen", "bm25_sequence": "bm25"}
OVERLAPS = {"answer_overlap": "answer known", "no_answer_overlap": "answer not known",
            "question_overlap": "question known", "no_question_overlap": "question not known"}
LEARNED = ("rag_token", "rag_sequence")  # the paper's rows of a retriever that trains
COMPARED = ("closed_book", *LEARNED)
WIKI_DEV = "task:trivia_qa:wiki_dev"  # the answers of TriviaQA's Wikipedia test set are hidden
MARKS = ("In brackets after a number of ours: dev = of the development set, as the test answers "
         "are not public, so not to be compared with the paper's; k = 1 and frozen retriever = the "
         "model was trained on one passage a question, or with the retriever as it was warmed up; "
         "of RAG-Token = a RAG-Sequence that spells its labels was not trained.")
GENERATION = ("msmarco", "jeopardy")
CONTROLS = 20  # control items on a sheet
OUTCOMES = {"first": "BART better", "second": "RAG-Token better", "both": "both good",
            "neither": "both poor", "no_majority": "no majority"}
BESIDE = "ours / paper's"

EXPERIMENTS: dict[str, Callable[[Lab], Section]] = {}  # by the names of the commands


def _experiment(title: str) -> Callable:
    """Registers the function that makes the parts of a section with this heading; the paper's notes
    on it, which have the function's name, come after them."""
    def register(parts: Callable[[Lab], Sequence[Part]]) -> Callable:
        def section(lab: Lab) -> Section:
            about = paper.NOTES.get(parts.__name__, ())
            return Section(title, [*parts(lab), *(f"On the paper: {note}" for note in about)])

        EXPERIMENTS[parts.__name__] = section
        return parts
    return register


def _named(column: str) -> str:
    """The heading of a column TASK.METRIC."""
    return " ".join(COLUMNS[part] for part in column.split("."))


def _asked(lab: Lab, column: str, run: str, what: Measurement) -> tuple[list[Measured], str]:
    """The results of all seeds for a column's task, and how they differ from the paper's ("" = not
    at all, or such as " (dev)"). No results where there is no such cell, or nothing is measured."""
    task = column.split(".")[0]
    merged = task.startswith("fever") and run in ONE_STEP
    run = ONE_STEP[run] if merged else run
    cells = lab.scale.cells(task, run)
    if not cells:
        return [], ""
    config = cells[0].running
    public = what._replace(split=WIKI_DEV) if task == "tqa_wiki" else cells[0].public(what)
    marks = {
        # Both kinds of RAG are the same for a class, which is one step of decoding; a label that is
        # spelt is several.
        "of RAG-Token": merged and not cells[0].config.classes,
        "dev": public != what,
        "k = 1": config.retrieval.k == 1,
        "frozen retriever": run in LEARNED and not overrides.trains_query_encoder(config)}
    marked = ", ".join(mark for mark, holds in marks.items() if holds)
    return measured(lab, cells, public), f" ({marked})" * bool(marked)


def _results(lab: Lab, column: str, run: str, what: Measurement) -> list[Measured]:
    return _asked(lab, column, run, what)[0]


def _scored(lab: Lab, table: Mapping[str, Mapping[str, float]], what: Measurement,
            extra: Sequence[str] = ()) -> Table:
    """A table of the paper with our numbers in it; `extra` are further rows, of ours alone."""
    columns = list(table["rag_token"])

    def cell(row: str, column: str) -> str:
        published = table.get(row, {}).get(column)
        if row not in OURS:
            return shown(published, "-")
        results, mark = _asked(lab, column, row, what)
        return beside(estimate(results, metric_of(column)), published, mark)

    rows = [[SYSTEMS.get(row, row), *(cell(row, column) for column in columns)]
            for row in (*extra, *table)]
    return Table([BESIDE, *map(_named, columns)], rows)


@_experiment("Table 1: open-domain question answering")
def table1(lab: Lab) -> list[Part]:
    """Test EM."""
    scored = _scored(lab, paper.TABLE1, Measurement(), ["closed_book"])
    results = {run: _results(lab, "nq.em", run, Measurement()) for run in COMPARED}
    closed = results["closed_book"]
    gains = [f"{SYSTEMS[run]} above the closed book: {gain} points." for run in LEARNED
             if (gain := estimate(results[run], "em", minus=closed))]
    missed = [[SYSTEMS[run], beside(share_of(results[run], *MISSED), published)] for run, published
              in zip(LEARNED, (paper.ANSWER_IN_NO_PASSAGE, None), strict=True)]
    known = [[SYSTEMS[run], *(shown(share_of(seeds, f"em_{part}", f"em_{part}_count"),
                                    "none" if seeds else NOT_RUN)
                              for part in OVERLAPS)] for run, seeds in results.items()]
    return ["Exact match on the test questions, percent.", scored, MARKS, *gains,
            "Exact match on those questions whose answer is in no passage retrieved (the paper "
            "does not say which of its models it is of).",
            Table([BESIDE, "NQ EM"], missed),
            "Not in the paper: exact match on the questions with, and without, an answer of the "
            "training set, and on those that are, and are not, in it themselves (none = there is "
            "no such question).",
            Table(["ours, NQ EM", *OVERLAPS.values()], known)]


@_experiment("Table 2: generation and fact verification")
def table2(lab: Lab) -> list[Part]:
    """Test."""
    return ["Test, percent.", _scored(lab, paper.TABLE2, Measurement()), MARKS]


@_experiment("Table 3: example generations")
def table3(lab: Lab) -> list[Part]:
    """Three inputs of every task, and what the first seed of each system makes of them."""
    header = ["task", "input", *(SYSTEMS[run] for run in COMPARED)]
    rows = []
    for task in GENERATION:
        seeds = [_results(lab, task, run, Measurement()) for run in COMPARED]
        systems = [{r["id"]: r for r in results[0].predictions} if results else {}
                   for results in seeds]
        first = next((list(records.values()) for records in systems if records), [])
        rows += [[COLUMNS[task], one["question"], *(
            _marked(records[one["id"]]) if records else NOT_RUN for records in systems)]
            for one in first[:: max(len(first) // 3, 1)][:3]]
    published = Table(header, [[COLUMNS[task], *cells] for task, *cells in paper.TABLE3])
    return ["Ours, inputs at equal distances in the test split (dev, where the test answers are "
            "not public); ≠ marks what equals no reference.",
            Table(header, rows) if rows else NOT_RUN,
            "The paper's; ? is factually wrong, * partly right.", published]


def _marked(record: Mapping) -> str:
    return record["answer"] if record["exact_match"] else f"≠ {record['answer']}"


@_experiment("Table 4: human evaluation")
def pairwise(lab: Lab) -> list[Part]:
    """Sheets for human judges, and their tally."""
    folder, systems = lab.root / "pairwise", _judged(lab.scale)
    others = sheets_of_others(lab.root, lab.scale)
    if others:
        lab.refused["pairwise"] = others
    results = measured(lab, systems, Measurement())
    about = f"Sheets: {NOT_RUN}."
    if len(results) == 2:
        items, controls = _pairs(*results)
        if lab.writes and (others or not (folder / "key.json").exists()):
            if others:  # judges may have them
                kept = files.set_aside(folder, "earlier")
                lab.refused["pairwise"] = f"{others}; the sheets are in {kept} now"
                print(f"{folder}: the sheets of another configuration, and their tally, are in "
                      f"{kept} now", flush=True)
                others = ""
            pairs.write(folder, items, controls, seed=0)
            files.write_json(
                folder / "made.json", [made_by(cell, lab.root) for cell in systems])
        about = (f"Sheets for judges: {folder}/sheet.html and sheet.csv, {len(items)} pairs "
                 f"and {len(controls)} control items; key.json stays with you. "
                 "--tally FILE.csv ... counts the filled-in ones.")
    tallied = None if others else pairs.read_tally(folder)
    rows = [[OUTCOMES[outcome], *(
        beside(tallied.shares[question][outcome] if tallied else None, published[question])
        for question in pairs.QUESTIONS)] for outcome, published in paper.TABLE4.items()]
    counted = [f"{tallied.pairs} pairs, {len(tallied.kept)} annotators; dropped by control "
               f"items: {', '.join(tallied.dropped) or 'nobody'}."] if tallied else []
    return [about, Table([BESIDE, *pairs.QUESTIONS], rows), *counted]


def _pairs(closed: Measured, ours: Measured) -> tuple[list[pairs.Pair], list[pairs.Pair]]:
    """Sentences of both systems, and control items: a true sentence about the subject against a
    true one about something else."""
    items = [pairs.Pair(a["question"], a["answer"], b["answer"]) for a, b in zip(
        closed.predictions, ours.predictions, strict=True)][: paper.TABLE4_PAIRS]
    gold = [(r["question"], r["references"][0]) for r in ours.predictions]
    controls = [pairs.Pair(subject, text, other) for (subject, text), (another, other) in zip(
        gold, gold[1:] + gold[:1], strict=True) if text != other and subject != another]
    return items, controls[:CONTROLS]


def _judged(scale: Scale) -> list[Cell]:
    """The two systems that judges compare."""
    return [cell for run in ("closed_book", "rag_token")
            for cell in scale.cells("jeopardy", run)[:1]]


def sheets_of_others(root: pathlib.Path, scale: Scale) -> str:
    """Why the sheets for judges below `root` are none of this scale's systems; "" if they are, or
    where there are none.

    Raises:
      DataError: the record of what made them is damaged.
    """
    folder, systems = root / "pairwise", _judged(scale)
    if not (folder / "key.json").exists():
        return ""
    with damaged_result_named(folder / "made.json"):
        made = read_json(folder / "made.json", [None] * len(systems))
        return next(filter(None, (stale(*pair, root)
                                  for pair in zip(made, systems, strict=True))), "")


@_experiment("Table 5: diversity")
def table5(lab: Lab) -> list[Part]:
    """Distinct over total tri-grams."""
    columns = ["msmarco.distinct", "jeopardy.distinct"]

    def cell(row: str, column: str) -> str:
        results, mark = _asked(lab, column, "rag_token" if row == "gold" else row, Measurement())
        texts = [[r["references"][0] if row == "gold" else r["answer"]
                  for r in result.predictions] for result in results[:1]]
        ours = distinct_trigrams(texts[0]) if texts else None
        return beside(ours, paper.TABLE5[row][column], mark)

    return ["Distinct tri-grams over all tri-grams of the test outputs, percent, of the first "
            "seed; brackets by the jackknife. The ratio falls with the number of outputs: compare "
            "within a column.",
            Table([BESIDE, *map(_named, columns)],
                  [[SYSTEMS[row], *(cell(row, column) for column in columns)]
                   for row in paper.TABLE5]), MARKS]


@_experiment("Table 6: ablations")
def table6(lab: Lab) -> list[Part]:
    """Ablations of the retriever, dev."""
    scored = _scored(lab, paper.TABLE6, Measurement("dev"))
    rows = [[f"{SYSTEMS[run]}, passages of another question", shown(estimate(
        _results(lab, "nq.em", run, Measurement("dev", shuffled=True)), "em"))] for run in LEARNED]
    return ["Dev, percent.", scored, MARKS,
            "Not in the paper: every question reads the passages of another one.",
            Table(["ours", "NQ EM"], rows)]


@_experiment("Figure 2: document posterior per token")
def figure2(lab: Lab) -> list[Part]:
    """Which passage gave which token."""
    published = list(zip(*paper.FIGURE2, strict=True))  # -> [T][K]
    maps = {'paper, "Hemingway" (relative)': (
        paper.FIGURE2_TOKENS, [f"Doc {i}" for i in range(1, 6)], published)}
    one = _explained(lab, "rag_token", Question(lab.scale.subject))
    parts: list[Part] = [f"Ours: {NOT_RUN}."]
    if one is not None:
        maps = {f'ours, "{lab.scale.subject}"': (one.tokens, one.passages, one.posterior), **maps}
        parts = [f"Input: {lab.scale.subject}. Output: {one.answer}",
                 Table(["passage", "text"], list(zip(one.passages, one.texts, strict=True)))]
    return [*parts, Plot("figure2", "p(passage | token) of RAG-Token, ours and the paper's.",
                         plots.heat_maps(maps))]


def _explained(lab: Lab, run: str, question: Question) -> Explained | None:
    """The answer of the first seed of a model of Jeopardy questions."""
    for cell in lab.scale.cells("jeopardy", run)[:1]:
        return lab.result(cell, question)
    return None


@_experiment("Partial decoding: titles that the generator knows")
def partial_decoding(lab: Lab) -> list[Part]:
    """The beginning of a title, completed by the generator without passages (section 4.2)."""
    rows, maps = [], {}
    for given in lab.scale.beginnings:
        one = _explained(lab, "closed_book", given)
        answer, completed = NOT_RUN, NOT_RUN
        if one is not None:
            answer, completed = one.answer, "yes" if given.title in one.answer else "no"
            if one.tokens:
                maps[f'ours, "{given.subject}": {given.beginning}'] = (
                    one.tokens, ["p(token | those before)"], [[p] for p in one.p])
        rows.append([given.subject, given.beginning, answer, given.title, given.about, completed])
    header = ["input", "given", "completed by BART, closed book"]
    sure = [Plot("partial_decoding", "How sure the generator alone is of each token that it adds.",
                 plots.heat_maps(maps))] if maps else []
    return ["The document posterior flattens after the first word of a title (figure 2), so the "
            "generator may know the rest by itself: BART without passages goes on from the "
            "beginning.", Table([*header, "title", "which is", "title completed"], rows), *sure,
            "The paper's.", Table(header, paper.PARTIAL_DECODING)]


@_experiment("Figure 3: number of passages")
def figure3(lab: Lab) -> list[Part]:
    """Scores and recall by the number of passages, dev."""
    figures, rows = [], []
    for column, published in paper.FIGURE3.items():
        points = {run: _points(lab, column, run) for run in published}
        rows += [[column, SYSTEMS[run], str(k), shown(points[run].get(k)),
                  shown(published[run].get(k), "-")] for run in published for k in lab.scale.ks]
        ours = {SYSTEMS[run]: {k: one.value for k, one in curve.items()}
                for run, curve in points.items() if curve}
        theirs = {SYSTEMS[run]: curve for run, curve in published.items()}
        picture = plots.curves({f"ours: {column}": ours, f"paper: {column}": theirs})
        figures.append(Plot(f"figure3-{column}", f"{column} by passages per question, dev, ours "
                            "and the paper's.", picture))
    return [*figures, Table(["figure", "system", "K", "ours", "paper's"], rows)]


def _points(lab: Lab, column: str, run: str) -> dict[int, Estimate]:
    """By number of passages, the points that are measured."""
    results = {k: _results(lab, column, run, Measurement("dev", k=k)) for k in lab.scale.ks}
    if column.endswith("recall"):
        points = {k: share_of(seeds, f"answer_recall@{k}") for k, seeds in results.items()}
    else:
        points = {k: estimate(seeds, metric_of(column)) for k, seeds in results.items()}
    return {k: point for k, point in points.items() if point is not None}


@_experiment("Index hot-swapping")
def hot_swap(lab: Lab) -> list[Part]:
    """The index of one year, asked for the leaders of another."""
    years = [(index, leaders) for index in ("2016", "2018") for leaders in ("2016", "2018")]
    results = {(index, leaders): _results(lab, "nq.em", "rag_token", Measurement(
        f"leaders_{leaders}", index=index)) for index, leaders in years}
    rows = [[index, leaders, beside(estimate(results[index, leaders], "em"),
                                    paper.HOT_SWAP[f"index{index}_leaders{leaders}"])]
            for index, leaders in years]
    old, new = results["2016", "2018"], results["2018", "2018"]
    same = [a["answer"] == b["answer"] for seed in zip(old, new, strict=True)
            for a, b in zip(*(result.predictions for result in seed), strict=True)
            ] if len(old) == len(new) else []  # interrupted: one may have fewer seeds
    return ["Exact match on leaders of offices that changed hands, RAG-Token, percent; nothing is "
            "trained in between.", Table(["index", "leaders", BESIDE], rows),
            "The same answer from both indexes: "
            f"{beside(100 * sum(same) / len(same) if same else None, paper.HOT_SWAP_SAME)} "
            "percent (v1 of the paper)."]


@_experiment("FEVER: retrieval of gold articles")
def fever_overlap(lab: Lab) -> list[Part]:
    """Claims with a gold article among the first passages."""
    results = _results(lab, "fever3", "rag_token", Measurement(k=10))
    rows = [[f"top {k}", beside(share_of(results, f"title_overlap@{k}", "titled_count"), published)]
            for k, published in paper.FEVER_OVERLAP.items()]
    return ["Claims with a gold article's title among the first passages, percent of those that "
            "have one.", Table(["passages", BESIDE], rows)]


_experiment("Objectives of the retriever")(retriever_learning.objectives)
_experiment("Retrieval learned from answers")(retriever_learning.learned_retrieval)
