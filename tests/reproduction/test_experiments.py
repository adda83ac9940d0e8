"""Reports from results on disk: our numbers beside the paper's, and "not run" for the rest."""

import json
import re
import signal

import pytest

from rag_jax import paper
from rag_jax.cli import reproduce
from rag_jax.config import Config, overrides
from rag_jax.errors import DataError, Preempted
from rag_jax.files import FolderError
from rag_jax.reproduction import run
from rag_jax.reproduction.cells import Cell, Explained, Measurement, Question
from rag_jax.reproduction.experiments import EXPERIMENTS
from rag_jax.reproduction.full import Full
from rag_jax.reproduction.lab import Lab, folder_of
from rag_jax.reproduction.provenance import made_by
from rag_jax.reproduction.retriever_learning import _while_training
from rag_jax.reproduction.sections import Plot, Table
from rag_jax.reproduction.toy import OBJECTIVES

FEVER3 = "FEVER 3-way accuracy"
FILES = {"data.passages": "p.tsv", "data.train": "t.jsonl", "data.dev": "d.jsonl"}  # no test set


class OnDisk:
    """A scale of two seeds, whose cells are never trained here."""

    name, about, ks, subject, starts = "toy", "made up", (1, 5), "Peru", (35, 400)
    beginnings = (Question("Peru", "This country has the capital Li", "Lima", "known"),
                  Question("Chad", "This country has the capital N'", "N'Djamena", "not known"))

    def __init__(self, **changes):
        self.changes = changes

    def cells(self, task, run):
        if task not in ("nq", "jeopardy", "msmarco", "fever3"):
            return []
        return [Cell(f"{task}-{seed}", overrides.replace(
            Config(seed=seed, runs=(run,)), self.changes), run)
                for seed in (0, 1)]


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path, OnDisk())


def put(lab, task, run, what, answers, **metrics):
    """Results of both seeds: [(answer, right)], in the form of write_evaluation."""
    for cell in lab.scale.cells(task, run):
        folder = lab.root / cell.folder / cell.run / "measured" / what.name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"id": str(i), "question": f"q{i}", "answer": answer,
                             "references": ["the true answer"], "exact_match": right,
                             "passages": []}) for i, (answer, right) in enumerate(answers)]
        (folder / "predictions.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "metrics.json").write_text(json.dumps({"count": len(answers), **metrics}))
        (folder / "made.json").write_text(json.dumps(made_by(cell, lab.root)))


def tables(section):
    return [part for part in section.parts if isinstance(part, Table)]


def cell(table, row, column):
    found, = (cells for cells in table.rows if cells[0] == row)
    return found[list(table.header).index(column)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_nothing_measured_is_not_run_everywhere(lab, name):
    """A number of ours that was not measured must not be in any report."""
    section = EXPERIMENTS[name](lab)
    assert any("not run" in str(part) for part in section.parts)
    for table in tables(section):
        for row in table.rows:
            for text in row:
                ours, slash, _ = text.partition(" / ")
                assert not slash or ours == "not run", (name, row)


def test_the_command_offers_every_experiment():
    """One that is registered alone could never be run; a name alone would be a traceback."""
    assert sorted(EXPERIMENTS) == sorted(reproduce.NAMES + reproduce.BEYOND)


def test_measured_cells_stand_beside_the_papers(lab):
    put(lab, "nq", "rag_token", Measurement(), [("a", True)] * 3 + [("b", False)])
    put(lab, "nq", "closed_book", Measurement(), [("a", False)] * 3 + [("b", True)])
    section = EXPERIMENTS["table1"](lab)
    table = tables(section)[0]
    assert re.fullmatch(r"75\.0 \[.*\] / 44\.1", cell(table, "RAG-Token", "NQ EM"))
    assert re.fullmatch(r"25\.0 \[.*\] / -", cell(table, "BART, closed book", "NQ EM"))
    assert cell(table, "RAG-Sequence", "NQ EM") == "not run / 44.5"
    assert cell(table, "RAG-Token", "TriviaQA EM") == "not run / 55.2"
    assert cell(table, "DPR", "TriviaQA EM") == "57.9"
    assert any("RAG-Token above the closed book: 50.0 [" in str(part) for part in section.parts)


def test_fever_has_one_cell_for_both_kinds_of_rag(lab):
    """With a head a class is one step, the same for both; spelt labels are RAG-Token's alone."""
    head = {"model.head": "classification", "eval.labels": ("SUPPORTS", "REFUTES")}
    for changes, mark in ((head, ""), ({}, " (of RAG-Token)")):
        lab = Lab(lab.root, OnDisk(**changes))
        put(lab, "fever3", "rag_token", Measurement(), [("SUPPORTS", True)] * 4)
        table = tables(EXPERIMENTS["table2"](lab))[0]
        assert cell(table, "RAG-Token", FEVER3) == "100.0 [100.0, 100.0] / 72.5"
        assert cell(table, "RAG-Sequence", FEVER3) == f"100.0 [100.0, 100.0]{mark} / 72.5"


def test_numbers_of_a_frozen_retriever_or_of_one_passage_say_so(lab):
    """A row that stands beside the paper's learned retriever must not be taken for one."""
    lab = Lab(lab.root, OnDisk(**{"retrieval.k": 1, "train.query_encoder_rate": None}))
    put(lab, "fever3", "rag_token", Measurement("dev"), [("SUPPORTS", True)])
    put(lab, "fever3", "frozen", Measurement("dev"), [("SUPPORTS", True)])
    table = tables(EXPERIMENTS["table6"](lab))[0]
    assert cell(table, "RAG-Token", FEVER3) == (
        "100.0 [100.0, 100.0] (k = 1, frozen retriever) / 74.5")
    assert cell(table, "RAG-Token, frozen retriever", FEVER3) == (
        "100.0 [100.0, 100.0] (k = 1) / 72.9")
    run.write_report(lab.root, lab.scale)
    assert "| 1 passage, a frozen query encoder |" in (lab.root / "report.md").read_text("utf-8")


def test_what_has_no_public_test_answers_is_measured_on_dev_and_says_so(lab):
    lab = Lab(lab.root, OnDisk(**FILES))
    put(lab, "msmarco", "rag_token", Measurement("dev"), [("a b c d", True)])
    for name in ("table2", "table3", "table5"):
        EXPERIMENTS[name](lab)
    assert {what.split for of, what in lab.missing if of.folder.startswith("msmarco")} == {"dev"}
    table = tables(EXPERIMENTS["table2"](lab))[0]
    assert re.fullmatch(r".* \(dev\) / 40\.1", cell(table, "RAG-Token", "MS-MARCO ROUGE-L"))
    table, = tables(EXPERIMENTS["table5"](lab))
    assert cell(table, "RAG-Token", "MS-MARCO distinct tri-grams") == (
        "100.0 [100.0, 100.0] (dev) / 77.8")


def test_what_the_data_do_not_have_is_said_and_never_asked_for(lab):
    """`missing` would list it for ever, and every --execute open the model again."""
    assert run.lacking(["hot_swap"], lab.root, lab.scale)[0]
    files = OnDisk(**FILES)
    assert not run.lacking(["hot_swap"], lab.root, files)[0]
    assert len(run.lacking(["hot_swap"], lab.root, files)[1]) == 8
    run.write_report(lab.root, files)
    assert "| nq-0/rag_token/leaders_2016-index_2016 | config.data.passages makes one index" in (
        lab.root / "report.md").read_text("utf-8")


def test_trivia_qa_of_wikipedia_is_measured_on_its_dev_set(tmp_path):
    lab = Lab(tmp_path, Full(tmp_path))
    put(lab, "tqa_wiki", "rag_token", Measurement("task:trivia_qa:wiki_dev"), [("a", True)])
    table = tables(EXPERIMENTS["table1"](lab))[0]
    assert cell(table, "RAG-Token", "TriviaQA Wiki EM") == "100.0 [100.0, 100.0] (dev) / 66.1"
    assert cell(table, "RAG-Token", "TriviaQA EM") == "not run / 55.2"


def test_answers_that_no_passage_has_stand_beside_the_papers(lab):
    put(lab, "nq", "rag_token", Measurement(), [("a", True)], em_answer_not_retrieved=20.0,
        answer_not_retrieved_count=50, em_no_answer_overlap=70.0, em_no_answer_overlap_count=10)
    _, missed, known = tables(EXPERIMENTS["table1"](lab))
    assert re.fullmatch(r"20\.0 \[.*\] / 11\.8", cell(missed, "RAG-Token", "NQ EM"))
    assert cell(known, "RAG-Token", "answer not known").startswith("70.0 [")
    assert cell(known, "RAG-Token", "answer known") == "none", "measured, but of no question"
    assert cell(known, "RAG-Sequence", "answer known") == "not run"
    assert cell(missed, "RAG-Sequence", "NQ EM") == "not run / -"


def test_gold_articles_are_those_of_the_evaluation(lab):
    put(lab, "fever3", "rag_token", Measurement(k=10), [("SUPPORTS", True)],
        **{"title_overlap@1": 50.0, "title_overlap@10": 75.0, "titled_count": 100})
    table, = tables(EXPERIMENTS["fever_overlap"](lab))
    assert [row[0] for row in table.rows] == ["top 1", "top 10"]
    low, high = map(float, re.fullmatch(r"50\.0 \[(.*), (.*)\] / 71\.0", table.rows[0][1]).groups())
    assert 38 < low < 42 and 58 < high < 62, "of the 100 claims that have a page, not of all"
    assert re.fullmatch(r"75\.0 \[.*\] / 90\.0", table.rows[1][1])


def test_a_split_is_not_taken_for_another(lab):
    put(lab, "nq", "rag_token", Measurement(), [("a", True)])
    first, _ = tables(EXPERIMENTS["table6"](lab))
    assert cell(first, "RAG-Token", "NQ EM") == "not run / 43.5"
    put(lab, "nq", "rag_token", Measurement("dev"), [("a", False)])
    put(lab, "nq", "rag_token", Measurement("dev", shuffled=True), [("a", True)])
    first, shuffled = tables(EXPERIMENTS["table6"](lab))
    assert cell(first, "RAG-Token", "NQ EM").startswith("0.0 [")
    assert shuffled.rows[0][1].startswith("100.0 [")


def test_example_generations_mark_what_is_wrong(lab):
    for name, answer in (("closed_book", ("nonsense", False)), ("rag_token", ("right", True))):
        put(lab, "jeopardy", name, Measurement(), [answer] * 9)
    ours, published = tables(EXPERIMENTS["table3"](lab))
    assert ours.rows[0] == ["Jeopardy", "q0", "≠ nonsense", "right", "not run"]
    assert [row[1] for row in ours.rows] == ["q0", "q3", "q6"]
    assert len(published.rows) == 4


def test_diversity_of_outputs_and_references(lab):
    put(lab, "msmarco", "rag_token", Measurement(), [("a b c d", True), ("a b c", True)])
    table, = tables(EXPERIMENTS["table5"](lab))
    column = "MS-MARCO distinct tri-grams"
    assert re.fullmatch(r"66\.7 \[.*\] / 77\.8", cell(table, "RAG-Token", column))
    assert re.fullmatch(r"50\.0 \[.*\] / 89\.6", cell(table, "references", column))


def test_hot_swap_and_the_share_of_equal_answers(lab):
    for memory, leaders, answers in (
            ("2016", "2016", [("x", True), ("y", True)]),
            ("2016", "2018", [("x", True), ("x", False)]),
            ("2018", "2016", [("y", False)] * 2), ("2018", "2018", [("x", True), ("y", False)])):
        put(lab, "nq", "rag_token", Measurement(f"leaders_{leaders}", index=memory), answers)
    section = EXPERIMENTS["hot_swap"](lab)
    table, = tables(section)
    shown = {(row[0], row[1]): row[2] for row in table.rows}
    assert shown["2016", "2016"].startswith("100.0 [") and shown["2018", "2018"][:6] == "50.0 ["
    assert re.fullmatch(r"50\.0 .* / 4\.0", shown["2016", "2018"])
    assert re.fullmatch(r"0\.0 .* / 12\.0", shown["2018", "2016"])
    assert any("50.0 / 21.0 percent" in str(part) for part in section.parts)


def test_a_hot_swap_interrupted_between_its_indexes_is_reported(lab):
    """A report on what else is there must not fail for the seed that has one index alone."""
    for index in ("2016", "2018"):
        put(lab, "nq", "rag_token", Measurement("leaders_2018", index=index), [("x", True)])
    (lab.root / "nq-1/rag_token/measured/leaders_2018-index_2018/metrics.json").unlink()
    section = EXPERIMENTS["hot_swap"](lab)
    assert any("not run / 21.0 percent" in str(part) for part in section.parts)


def test_curves_over_passages(lab):
    put(lab, "nq", "rag_token", Measurement("dev", k=5), [("a", True)],
        **{"answer_recall@1": 40.0, "answer_recall@5": 60.0})
    section = EXPERIMENTS["figure3"](lab)
    table, = tables(section)
    rows = {tuple(row[:3]): row[3:] for row in table.rows}
    assert rows["nq.em", "RAG-Token", "5"] == ["100.0 [100.0, 100.0]", "43.4"]
    assert rows["nq.em", "RAG-Token", "1"] == ["not run", "39.9"]
    recall, published = rows["nq.answer_recall", "RAG-Token", "5"]
    assert re.fullmatch(r"60\.0 \[.*\]", recall) and published == "70.0"
    assert rows["nq.answer_recall", "RAG-Token", "1"] == ["not run", "51.8"]
    assert sum(isinstance(part, Plot) for part in section.parts) == len(paper.FIGURE3)


def test_pairs_for_judges_and_their_tally(lab):
    answers = [(f"sentence {i}", True) for i in range(6)]
    put(lab, "jeopardy", "closed_book", Measurement(), answers)
    put(lab, "jeopardy", "rag_token", Measurement(), answers[::-1])
    EXPERIMENTS["pairwise"](lab)
    sheet = (lab.root / "pairwise" / "sheet.csv").read_text()
    for file in lab.root.rglob("predictions.jsonl"):  # measured anew, when judges have the sheets
        file.write_text(file.read_text().replace("sentence", "phrase"))
    EXPERIMENTS["pairwise"](lab)
    assert (lab.root / "pairwise" / "sheet.csv").read_text() == sheet and "sentence 5" in sheet
    (lab.root / "pairwise" / "tally.json").write_text(json.dumps({
        "shares": {q: {"first": 10, "second": 50, "both": 20, "neither": 15, "no_majority": 5}
                   for q in ("factuality", "specificity")},
        "pairs": 6, "kept": ["ann"], "dropped": ["eve"]}))
    section = EXPERIMENTS["pairwise"](lab)
    table, = tables(section)
    assert cell(table, "RAG-Token better", "factuality") == "50.0 / 42.7"
    assert any("dropped by control items: eve" in str(part) for part in section.parts)


def test_sheets_of_another_configuration_are_put_aside_with_their_tally(lab, capsys):
    """The sheets of a reduced run must not stand for those of the full one."""
    short = Lab(lab.root, OnDisk(**{"train.steps": 4}))
    for run_name in ("closed_book", "rag_token"):
        put(short, "jeopardy", run_name, Measurement(), [(f"short {i}", True) for i in range(6)])
    EXPERIMENTS["pairwise"](short)
    folder = lab.root / "pairwise"
    (folder / "tally.json").write_text(json.dumps({
        "shares": {q: dict.fromkeys(paper.TABLE4, 20) for q in ("factuality", "specificity")},
        "pairs": 6, "kept": ["ann"], "dropped": []}))
    table, = tables(EXPERIMENTS["pairwise"](lab))
    assert cell(table, "both good", "factuality") == "not run / 11.7"
    assert (folder / "tally.json").exists(), "kept in their place until there are others"
    assert "train.steps: 4 there, 1000 now" in lab.refused["pairwise"]
    with pytest.raises(DataError, match="its sheets are of another .*train.steps.*give the same"):
        run.tally(lab.root, lab.scale, [folder / "sheet.csv"])
    for run_name in ("closed_book", "rag_token"):
        put(lab, "jeopardy", run_name, Measurement(), [(f"long {i}", True) for i in range(6)])
    EXPERIMENTS["pairwise"](Lab(lab.root, lab.scale, writes=False))
    assert (folder / "tally.json").exists(), "a look changes nothing"
    EXPERIMENTS["pairwise"](lab)
    assert f"are in {lab.root / 'earlier-pairwise'} now" in capsys.readouterr().out
    assert "short" in (lab.root / "earlier-pairwise" / "sheet.csv").read_text()
    assert (lab.root / "earlier-pairwise" / "tally.json").exists()
    assert "long" in (folder / "sheet.csv").read_text() and not (folder / "tally.json").exists()


def test_completed_titles_are_told_from_those_that_are_not(lab):
    """Section 4.2 asks what the generator knows by itself: no passages, no RAG."""
    known, unknown = lab.scale.beginnings
    jeopardy = lab.scale.cells("jeopardy", "closed_book")[0]
    file = folder_of(lab.root, jeopardy) / "completed.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({beginning.key: {
        "made": made_by(jeopardy, lab.root),
        **Explained(beginning.beginning + rest, [rest], [0.5], [], [], [])._asdict()}
        for beginning, rest in ((known, "ma."), (unknown, "ova."))}))
    section = EXPERIMENTS["partial_decoding"](lab)
    ours, published = tables(section)
    assert [(row[2], row[-1]) for row in ours.rows] == [
        ("This country has the capital Lima.", "yes"),
        ("This country has the capital N'ova.", "no")]
    assert published.rows[0][1] == '"The Sun' and "Also Rises" in published.rows[0][2]
    picture, = (part for part in section.parts if isinstance(part, Plot))
    assert picture.name == "partial_decoding" and not lab.missing


def test_what_needs_files_that_nobody_can_download_does_not_stop_the_rest(
        tmp_path, monkeypatch, capsys):
    """Days of training ended at the first task whose files have no address; the rest never came."""
    done, data = [], tmp_path / "data" / "jeopardy"
    monkeypatch.setattr(run.Worker, "work_out", lambda self, cell, what: done.append(cell.folder))
    monkeypatch.setattr(run, "write_report", lambda root, scale: done.append("report"))

    def worked():
        done.clear()
        try:
            run.reproduce(["table2"], tmp_path, Full(tmp_path, str(data.parent)), work=True)
        finally:
            done[:] = dict.fromkeys(done)

    tasks = ["msmarco", "fever3", "fever2"]
    with pytest.raises(DataError, match=f"left out.*\n.*{data}/train.zip: fetch .* by hand"):
        worked()
    assert sorted(done) == sorted([*tasks, "report"])
    printed = capsys.readouterr().out
    assert 0 < printed.index(f"{data}/test.zip: fetch") < printed.index("report.md")
    (tmp_path / "jeopardy" / "data").mkdir(parents=True)
    (tmp_path / "jeopardy" / "data" / "names.txt").touch()  # its data are made: the files may go
    worked()
    assert sorted(done) == sorted([*tasks, "jeopardy", "report"])
    (tmp_path / "jeopardy" / "data" / "names.txt").unlink()
    data.mkdir(parents=True)
    for split in ("train", "val", "test"):
        (data / f"{split}.zip").touch()
    worked()
    assert sorted(done) == sorted([*tasks, "jeopardy", "report"])


def test_a_signal_outside_training_ends_it_as_one_that_goes_on(lab, monkeypatch):
    """Its status was that of a killed process, where that of `train` says: run it again."""
    asked = []
    monkeypatch.setattr(run.Worker, "work_out", lambda self, cell, what: (
        asked.append(cell), signal.raise_signal(signal.SIGTERM)))
    outer = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(Preempted, match="all that was finished is kept"):
            run.reproduce(["table1"], lab.root, lab.scale, work=True)
    finally:
        signal.signal(signal.SIGTERM, outer)
    assert len(asked) == 1


@pytest.mark.parametrize("file, content", [
    ("dev/made.json", "{"), ("dev/made.json", "[]"), ("dev/made.json", "{}"),
    ("dev/metrics.json", '{"em": 1'), ("dev/metrics.json", "{}"), ("dev/metrics.json", "[]"),
    ("dev/predictions.jsonl", ""), ("dev/predictions.jsonl", '{"id": "0"'),
    ("dev/predictions.jsonl", None), ("explained.json", '{"Peru": '), ("explained.json", "[]"),
    ("dev/metrics.json", '{"count": 1, "em": null}'),
    *(("dev/predictions.jsonl", json.dumps({"id": "0", "question": "q", "answer": "x",
                                            "references": ["x"], "exact_match": True} | wrong))
      for wrong in ({"exact_match": None}, {"references": []}, {"answer": 3})),
    *(("explained.json", {"answer": "x", "tokens": ["x"], "p": [0.5], "passages": ["1"],
                          "texts": ["t"], "posterior": [[1.0]]} | wrong)
      for wrong in ({"posterior": [[]]}, {"texts": []}, {"p": []}, {"p": ["a"]}))])
def test_a_damaged_result_is_named(lab, file, content):
    """A traceback, or a number of the questions that are left."""
    put(lab, "nq", "rag_token", Measurement("dev"), [("x", True)])
    path = folder_of(lab.root, lab.scale.cells("nq", "rag_token")[0]) / file
    path.unlink(missing_ok=True)
    if isinstance(content, dict):
        cell = lab.scale.cells("nq", "rag_token")[0]
        content = json.dumps({"Peru": {"made": made_by(cell, lab.root), **content}})
    if content is not None:
        path.write_text(content)
    what = Question("Peru") if file == "explained.json" else Measurement("dev")
    damaged = path if file == "explained.json" else path.parent
    with pytest.raises(DataError, match=f"{damaged}: damaged .*remove it"):
        lab.result(lab.scale.cells("nq", "rag_token")[0], what)


def test_a_damaged_result_of_another_experiment_ends_a_campaign_before_it_trains(lab, monkeypatch):
    """The report, which shows all experiments, met it after hours of training."""
    put(lab, "nq", "rag_token", Measurement("dev"), [("x", True)])
    folder = folder_of(lab.root, lab.scale.cells("nq", "rag_token")[0])
    (folder / "dev" / "predictions.jsonl").write_text("")
    monkeypatch.setattr(run.Worker, "work_out", lambda *_: pytest.fail("it trains"))
    with pytest.raises(DataError, match=f"{folder / 'dev'}: damaged"):
        run.reproduce(["partial_decoding"], lab.root, lab.scale, work=True)


@pytest.mark.parametrize("content", ["[", "[]", "{}", "[1, 2]"])
def test_damaged_records_of_the_sheets_are_named(lab, content):
    for run_name in ("closed_book", "rag_token"):
        put(lab, "jeopardy", run_name, Measurement(), [("x", True), ("y", True)])
    EXPERIMENTS["pairwise"](lab)
    (lab.root / "pairwise" / "made.json").write_text(content)
    with pytest.raises(DataError, match=r"pairwise/made\.json: damaged"):
        EXPERIMENTS["pairwise"](lab)


def test_the_report_names_models_and_commit_and_is_written_whole(lab):
    put(lab, "nq", "rag_token", Measurement(), [("a", True)])
    run.write_report(lab.root, lab.scale)
    text = (lab.root / "report.md").read_text("utf-8")
    assert "| nq-1/rag_token | 1 |" in text and "nq-0/config.json" in text
    assert re.search(r"Measured by: rag_jax (commit [0-9a-f]{40}|\d).*, Python 3\..*, jax 0", text)
    for heading in ("Table 1", "Table 2", "Table 3", "Table 4", "Table 5", "Table 6", "Figure 2",
                    "Figure 3", "hot-swapping", "FEVER"):
        assert re.search(rf"^## .*{heading}", text, re.M), heading
    wanted = [(c.folder, c.run, what) for c, what in run.lacking(
        ["table1", "table6", "figure2"], lab.root, lab.scale)[0]]
    assert ("nq-0", "rag_sequence", Measurement()) in wanted
    assert ("nq-0", "rag_token", Measurement()) not in wanted
    assert ("jeopardy-0", "rag_token", Question("Peru")) in wanted
    completed = run.lacking(["partial_decoding"], lab.root, lab.scale)[0]
    assert [(c.folder, c.run, what) for c, what in completed] == [
        ("jeopardy-0", "closed_book", beginning) for beginning in lab.scale.beginnings]
    assert len(set(wanted)) == len(wanted)
    visits = [w[:2] for i, w in enumerate(wanted) if not i or wanted[i - 1][:2] != w[:2]]
    assert len(set(visits)) == len(visits), "a model must not be opened twice"


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_a_report_of_somebody_else_is_not_replaced(lab, name):
    """A folder that had one was enough to lose it, and be it for printing the recipe."""
    for _ in range(2):  # our own one is
        run.reproduce(["table1"], lab.root, lab.scale, work=False)
    (lab.root / name).write_text("of mine")
    with pytest.raises(FolderError, match=f"{name} is no report of rag_jax.reproduce.*--workdir"):
        run.reproduce(["table1"], lab.root, lab.scale, work=False)
    assert (lab.root / name).read_text() == "of mine"


def test_the_report_says_which_program_measured_which_model_and_when(lab):
    put(lab, "nq", "rag_token", Measurement(), [("a", True)])
    put(lab, "nq", "closed_book", Measurement(), [("a", True)])
    older = lab.root / "nq-0" / "closed_book" / "measured" / "test" / "made.json"
    older.write_text(json.dumps({**json.loads(older.read_text()),
                                 "program": "rag_jax 0.0", "date": "2001-02-03"}))
    run.write_report(lab.root, lab.scale)
    text = (lab.root / "report.md").read_text("utf-8")
    assert "| config | measured on | by |\n" in text
    assert re.search(r"\| nq-0/closed_book \| .* \| 2001-02-03 \| 1 \|", text)
    assert re.search(r"\| nq-1/closed_book \| .* \| 20\d\d-\d\d-\d\d \| 2 \|", text)
    assert "Measured by (1): rag_jax 0.0." in text and "Measured by (2): rag_jax" in text


def test_the_report_says_what_it_does_not_count(lab):
    put(Lab(lab.root, OnDisk(**{"train.steps": 4})), "nq", "rag_token", Measurement(),
        [("a", True)])
    run.write_report(lab.root, lab.scale)
    text = (lab.root / "report.md").read_text("utf-8")
    assert "not run / 44.1" in text and "100.0 [" not in text
    assert "| nq-0/rag_token/test | config.train.steps: 4 there, 1000 now |" in text


def test_an_objective_stands_beside_the_frozen_retriever_of_its_reader(lab):
    """Fusion-in-Decoder's gain was taken over RAG-Token's frozen retriever."""
    class Objectives(OnDisk):
        def cells(self, task, run):
            objective = task.removeprefix("objective_")
            return [Cell(f"{task}-{seed}", overrides.replace(Config(seed=seed, runs=(run,)), {
                "train.retriever_objective": objective}), run) for seed in (0, 1)
                    if objective in OBJECTIVES.get(run, ())]

    lab = Lab(lab.root, Objectives())
    for run_name, rights in (("frozen", 0), ("fid", 1), ("fid_joint", 3)):
        task = "objective_adist" if run_name == "fid_joint" else "objective_marginal"
        put(lab, task, run_name, Measurement(), [("a", i < rights) for i in range(4)],
            **{"answer_recall@1": 25.0 * rights, "answer_recall@5": 100.0})
    section = EXPERIMENTS["objectives"](lab)
    table, = tables(section)
    name, gain = "Fusion-in-Decoder, adist", "EM above frozen"
    assert cell(table, name, "EM / on 64 examples of NQ").startswith("75.0 [")
    assert cell(table, name, "EM / on 64 examples of NQ").endswith(" / 40.9")
    assert cell(table, name, gain).startswith("50.0 [")
    assert cell(table, name, "answer recall@1").startswith("75.0 [")
    assert cell(table, "RAG-Token, pdist", gain) == "not run"
    assert cell(table, "Fusion-in-Decoder, frozen retriever", gain) == "-"
    assert [part.name for part in section.parts if isinstance(part, Plot)] == ["objectives"]


def test_a_trained_retriever_stands_beside_the_frozen_one_of_its_seed(lab):
    """A gain over another start's frozen retriever, or a harm that nobody counts."""
    class Starts(OnDisk):
        def cells(self, task, run):
            return [Cell(f"{task}-{seed}", Config(seed=seed, runs=(run,)), run) for seed in (0, 1)]

    lab = Lab(lab.root, Starts())
    for start, run_name, recall in ((35, "frozen", 50.0), (35, "rag_token", 75.0),
                                    (400, "frozen", 100.0), (400, "rag_token", 75.0)):
        put(lab, f"start_{start}", run_name, Measurement(), [("a", i < 2) for i in range(4)],
            **{"answer_recall@1": 25.0, "answer_recall@5": recall})
    for seed, recall in enumerate((40.0, 60.0)):
        (lab.root / f"start_35-{seed}" / "rag_token" / "metrics.jsonl").write_text(
            json.dumps({"step": 7, "dev/answer_recall@5": recall}) + "\n" + '{"step": 8}\n{"st')
    section = EXPERIMENTS["learned_retrieval"](lab)
    table, = tables(section)
    assert cell(table, "35", "answer recall@5, trained").startswith("75.0 [")
    assert cell(table, "35", "recall@5 gained, by seed") == "+25.0, +25.0"
    assert cell(table, "400", "recall@5 gained, by seed") == "-25.0, -25.0"
    assert section.parts[-1].endswith("below the frozen retriever: 2 of 4.")
    seeds = lab.scale.cells("start_35", "rag_token")
    assert _while_training(lab, seeds, "dev/answer_recall@5") == {7: 50.0}
    (folder_of(lab.root, seeds[1]) / "test" / "metrics.json").unlink()
    assert _while_training(lab, seeds, "dev/answer_recall@5") == {7: 40.0}, "of what counts alone"
