"""Families of metrics over predictions: what they return, and what they take for granted."""

import json
import typing

import numpy as np
import pytest

from rag_jax.cli import evaluate
from rag_jax.config import Config, ConfigError, EvalConfig, MetricFamily, overrides, rules
from rag_jax.data.question_files import Example
from rag_jax.errors import DataError, UserError
from rag_jax.metrics import patterns
from rag_jax.metrics.bleu import corpus_sacre_bleu
from rag_jax.metrics.bootstrap import interval
from rag_jax.retrieval.protocol import Passage
from rag_jax.scoring import FAMILIES, answer_ranks, is_correct, read_predictions, score

EXAMPLES = [
    Example("1", "Where is Peru's government?", ("Lima",), titles=("Lima",)),
    Example("2", "Where is Ecuador's government?", ("Quito",), titles=("Quito",)),
    Example("3", "Where is Bolivia's government?", ("La Paz", "Sucre"), titles=("La Paz",)),
]
RETRIEVED = [
    [Passage("a", "Lima", "Lima is in Peru."), Passage("b", "Peru", "A country.")],
    [Passage("c", "Peru", "A country."), Passage("d", "Quito", "Quito is high.")],
    [Passage("e", "Chile", "A country."), Passage("f", "Peru", "A country.")],
]
PATTERNS = [Example("1", "When?", (r"19\d\d", "never"), regex=True),
            Example("2", "When?", (r"in 20\d\d",), regex=True)]


def test_what_holds_for_every_task():
    found = score(["lima", "Lima", "the Sucre"], EXAMPLES, (), RETRIEVED)
    assert found["em"] == found["score"] == pytest.approx(200 / 3)
    assert 0 <= found["em_ci_low"] < found["em"] < found["em_ci_high"] <= 100
    assert found["answer_recall@1"] == pytest.approx(100 / 3) and found["count"] == 3
    assert "answer_recall@5" not in found
    # Bolivia's answer is in no passage, and is given none the less
    assert (found["em_answer_not_retrieved"], found["answer_not_retrieved_count"]) == (100.0, 1)


def test_a_question_counts_as_not_retrieved_only_if_no_passage_has_any_of_its_answers():
    found = score(["x"] * 2, EXAMPLES[:2], (), RETRIEVED[:2])
    assert found["answer_not_retrieved_count"] == 0 and "em_answer_not_retrieved" not in found
    assert "answer_not_retrieved_count" not in score(["x"] * 2, EXAMPLES[:2])


def test_regular_expressions_are_matched_as_such_everywhere():
    predictions = ["1950s", "it was in 2001"]
    assert [is_correct(*pair) for pair in zip(predictions, PATTERNS, strict=True)] == [True, False]
    passages = [[Passage("a", "", "since 1950")], [Passage("b", "", "in 20 days")]]
    found = score(predictions, PATTERNS, ("regex", "qa"), passages)
    assert found["em"] == found["score"] == found["regex_match"] == 50.0
    assert found["regex_search"] == 100.0
    assert found["answer_recall@1"] == 50.0
    assert "f1" not in found, "words of a pattern are no words of an answer"
    mixed = score(["1950", "Lima"], [PATTERNS[0], EXAMPLES[0]], ("qa", "regex"))
    assert (mixed["em"], mixed["f1"], mixed["regex_match"]) == (100.0, 100.0, 100.0)
    with pytest.raises(ConfigError, match="metrics=regex: no question has"):
        score(["x"], EXAMPLES[:1], ("regex",))


def test_ms_marco_leaves_out_questions_without_an_answer_and_lower_cases():
    examples = [Example("1", "q", ("The cat sat, there.",)),
                Example("2", "q", ("No Answer Present.",))]
    found = score(["the cat  sat, there.", "a b c d e f g"], examples, ("ms_marco",))
    assert found["bleu_1"] == pytest.approx(100, abs=1e-6), "an extra space is no word of BLEU"
    assert 80 < found["rouge_l"] < 100, "but it is one of ROUGE-L's, in the official scorer"
    assert found["score"] == found["rouge_l"] and found["answerable_count"] == 1
    assert found["distinct_trigrams"] == 100.0
    near = [["the cat sat there."], [examples[0].answers]]
    assert score([near[0][0], "a b c d"], examples, ("ms_marco",))["sacre_bleu"] == pytest.approx(
        corpus_sacre_bleu(*near))
    with pytest.raises(ConfigError, match="every answer is 'No Answer Present.'"):
        score(["x"], examples[1:], ("ms_marco",))


def test_jeopardy_is_chosen_by_q_bleu():
    examples = [Example("1", "Lima", ("It is the capital of Peru",))] * 2
    found = score(["It is the capital of Peru", "It is the capital of Chile"], examples,
                  ("jeopardy",))
    assert found["score"] == found["q_bleu_1"] < 100
    assert found["sentence_bleu_1"] == pytest.approx(100 * (1 + 5 / 6) / 2)
    assert found["distinct_trigrams"] == pytest.approx(100 * 5 / 8)


def test_fever_counts_labels_and_gold_pages():
    examples = [EXAMPLES[i]._replace(answers=(label,)) for i, label in enumerate(
        ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO"))]
    found = score(["SUPPORTS", "SUPPORTS", "NOT ENOUGH INFO"], examples, ("fever",), RETRIEVED)
    assert found["score"] == found["accuracy"] == pytest.approx(200 / 3)
    assert found["accuracy_2way"] == 50.0 and found["accuracy_refutes"] == 0.0
    assert found["title_overlap@1"] == pytest.approx(100 / 3)
    five = [[*passages, *passages, passages[0]] for passages in RETRIEVED]
    found = score(["SUPPORTS"] * 3, examples, ("fever",), five)
    assert found["title_overlap@5"] == pytest.approx(200 / 3)
    assert found["title_precision@5"] == pytest.approx(200 / 3 / 5)
    assert "title_overlap@1" not in score(["SUPPORTS"], examples[:1], ("fever",))


def test_kilt_counts_answers_that_come_with_their_page_in_front():
    found = score(["Lima", "Quito", "Lima"], EXAMPLES, ("kilt",), RETRIEVED)
    assert found["em"] == found["score"] == pytest.approx(200 / 3)
    for name in ("r_precision", "kilt_em", "kilt_f1", "kilt_accuracy", "page_recall@1"):
        assert found[name] == pytest.approx(100 / 3), name
    closed_book = score(["Lima"], EXAMPLES[:1], ("kilt",))
    assert closed_book["score"] == 100.0 and "r_precision" not in closed_book


EVIDENCE = [  # two sets, the first of two pages; its pages are never in front together
    Example("1", "q", ("Lima",), titles=("Lima", "Peru", "Inca"),
            evidence=("7\tLima\n9\tPeru", "12\tInca")),
    Example("2", "q", ("Quito",), titles=("Quito",), evidence=("8\tQuito",)),
]
PAGES = [[Passage("9.1", "Peru", "x"), Passage("9.2", "Peru", "y"), Passage("7", "Lima", "z"),
          Passage("12.4", "Renamed", "w")],
         [Passage("80", "Quito", "x"), Passage("8.3", "Renamed", "y"), Passage("1", "A", "z"),
          Passage("2", "B", "w")]]


def test_kilt_scores_evidence_sets_by_page_as_its_own_script():
    """By hand. Pages found: 9, 7, 12 and 80, 8, 1, 2. R-precision: {9, 7} of {7, 9}, and 80 is
    not 8. Recall: the first question's sets are complete at rank 1 (both pages hold one place) and
    2, the second one's at rank 2."""
    by_id = EvalConfig(kilt_pages="id")
    found = score(["Lima", "Quito"], EVIDENCE, ("kilt",), PAGES, how=by_id)
    assert (found["r_precision"], found["kilt_em"], found["em"]) == (50, 50, 100)
    assert found["page_recall@1"] == pytest.approx(100 * (1 / 2 + 0) / 2)
    assert found["page_recall@4"] == 100
    # By title the renamed pages are none of the gold ones, and Quito is in front.
    found = score(["Lima", "Quito"], EVIDENCE, ("kilt",), PAGES)
    assert found["r_precision"] == found["kilt_em"] == 100
    assert found["page_recall@4"] == pytest.approx(100 * (1 / 2 + 1) / 2)
    one = [EXAMPLES[0]._replace(titles=("Lima",))]
    with pytest.raises(ConfigError, match="kilt_pages=id: question '1' has titles, but no ids"):
        score(["Lima"], one, ("kilt",), RETRIEVED[:1], how=by_id)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_headline_has_its_bootstrap_interval(family):
    """The interval of em beside a ROUGE-L would be taken for that of the ROUGE-L."""
    labels = ("SUPPORTS", "REFUTES")
    examples = [Example(str(i), "q", (labels[i % 2],), regex=family == "regex")
                for i in range(60)]
    predictions = [f"SUPPORTS{' and more words' * (i % 3 == 0)}" for i in range(60)]
    found = score(predictions, examples, (family,))
    name = FAMILIES[family].headline
    values = [score([p], [e], (family,))[name] for p, e in zip(predictions, examples, strict=True)]
    assert found["score"] == found[name] == pytest.approx(np.mean(values))
    assert (found[f"{name}_ci_low"], found[f"{name}_ci_high"]) == pytest.approx(interval(values))
    assert found[f"{name}_ci_low"] < found[name] < found[f"{name}_ci_high"]


def test_overlap_with_training_is_of_texts_and_not_of_expressions():
    train = [EXAMPLES[0]]
    found = score(["Lima", "x", "La Paz"], EXAMPLES, (), train=train)
    assert (found["em_answer_overlap"], found["em_answer_overlap_count"]) == (100, 1)
    assert (found["em_no_answer_overlap"], found["em_no_question_overlap_count"]) == (50, 2)
    found = score(["1950", "x"], PATTERNS, (), train=PATTERNS[:1])
    assert found["em_question_overlap_count"] == 2 and "em_answer_overlap_count" not in found
    mixed = [EXAMPLES[0], PATTERNS[0]]  # one expression took the value from all; or it was a text
    found = score(["x", "1950"], mixed, (), train=[*train, PATTERNS[1]._replace(answers=("Lima",))])
    assert (found["em_answer_overlap"], found["em_answer_overlap_count"]) == (0, 1)
    found = score(["x", "1950"], mixed, (), train=[PATTERNS[1]._replace(answers=("Lima",))])
    assert found["em_answer_overlap_count"] == 0 and found["em_no_answer_overlap_count"] == 1


def test_decomposed_answers_are_equal_in_every_score():
    """config.eval.nfd changed EM alone: F1 and the overlap said that the same texts differ."""
    asked = [Example("1", "Who is Beyonc\u00e9?", ("Beyonc\u00e9",))]
    train = [Example("t", "Who is Beyonce\u0301?", ("Beyonce\u0301",))]
    for nfd in (False, True):
        found = score(["Beyonce\u0301"], asked, how=EvalConfig(nfd=nfd), train=train)
        assert found["em"] == found["f1"] == 100 * nfd
        assert found["em_answer_overlap_count"] == found["em_question_overlap_count"] == nfd
        asked = [asked[0]._replace(titles=("B",))]
        found = score(["Beyonce\u0301"], asked, ("kilt",), [[Passage("1", "B", "")]],
                      how=EvalConfig(nfd=nfd))
        assert found["kilt_em"] == found["kilt_f1"] == 100 * nfd


def test_families_are_those_of_the_configuration():
    assert set(FAMILIES) == set(typing.get_args(MetricFamily))
    assert Config().eval.metrics == ("qa",)
    config = overrides.replace(Config(), {"eval.metrics": "ms_marco,qa"})
    assert config.eval.metrics == ("ms_marco", "qa")
    with pytest.raises(ConfigError, match="did you mean jeopardy"):
        overrides.replace(Config(), {"eval.metrics": "jeopady"})
    with pytest.raises(ConfigError, match="config.eval.metrics"):
        rules.validate(overrides.replace(Config(), {"eval.metrics": ("rouge",)}))


def test_misuse_is_an_error_and_not_a_low_score():
    with pytest.raises(ValueError, match="2 predictions for 3"):
        score(["a", "b"], EXAMPLES)
    with pytest.raises(ValueError, match="no questions"):
        score([], [])


def test_predictions_in_a_file_are_scored_without_a_model(tmp_path, capsys):
    questions, predictions = tmp_path / "q.jsonl", tmp_path / "p.jsonl"
    questions.write_text("".join(
        json.dumps({"id": e.id, "question": e.question, "answers": e.answers}) + "\n"
        for e in EXAMPLES))
    lines = [json.dumps({"id": e.id, "answer": e.answers[0]}) for e in reversed(EXAMPLES)]
    predictions.write_text("\n".join(lines) + "\n")
    flags = [f"--predictions={predictions}", f"--questions={questions}"]
    evaluate.main(flags)
    shown = capsys.readouterr().out.split()
    assert shown[shown.index("em") + 1] == shown[shown.index("f1") + 1] == "100"
    evaluate.main([*flags, "--config.eval.metrics=jeopardy"])
    shown = capsys.readouterr().out.split()
    assert "q_bleu_1" in shown and "f1" not in shown
    for wrong in (flags[:1], [*flags, "--out=x"], [*flags, "--workdir=w"],
                  [*flags, "--step=0"]):  # nothing was written, or would have been read
        with pytest.raises(ConfigError, match="prints a table, for the answers to --questions"):
            evaluate.main(wrong)

    with pytest.raises(ConfigError, match="config.eval.max_examples: would change nothing"):
        evaluate.main([*flags, "--config.eval.max_examples=1"])

    def failing(*changed):
        predictions.write_text("\n".join(changed))
        with pytest.raises(UserError) as raised:
            read_predictions(predictions, EXAMPLES)
        return str(raised.value)

    assert 'p.jsonl:2: no "answer"' in failing(lines[0], '{"id": "2"}')
    assert "p.jsonl:1: not JSON" in failing("not JSON")
    assert "p.jsonl:3: a second answer to question '3'" in failing(*lines[:2], lines[0])
    assert "no prediction for id '1'" in failing(*lines[:2])
    assert "no question, but a prediction for id '9'" in failing(
        *lines, '{"id": "9", "answer": "x"}')
    assert "no prediction for id '1'" in failing()  # which of them was a matter of chance
    with pytest.raises(ConfigError, match="no such file"):
        read_predictions(tmp_path / "none", EXAMPLES)


@pytest.mark.filterwarnings("ignore:.*questions")  # fewer than the official file has
def test_the_questions_of_a_task_are_looked_for_in_config_data_data_dir(tmp_path, capsys):
    (tmp_path / "natural_questions").mkdir()
    (tmp_path / "natural_questions/NQ-open.dev.jsonl").write_text(
        '{"question": "who wrote it", "answer": ["Ann"]}\n')
    (tmp_path / "p.jsonl").write_text('{"id": "1", "answer": "Ann"}\n')
    evaluate.main([f"--predictions={tmp_path}/p.jsonl", "--questions=task:natural_questions:test",
                   f"--data_dir={tmp_path}"])
    shown = capsys.readouterr().out.split()
    assert shown[shown.index("em") + 1] == "100"


def test_the_question_of_a_pattern_that_runs_for_ever_is_named(monkeypatch):
    monkeypatch.setattr(patterns, "LIMIT_SECS", 0.02)
    example, text = Example("q7", "Who?", ("(?:a|aa)+$",), regex=True), "a" * 80 + "b"
    for scored in (lambda: is_correct(text, example),
                   lambda: answer_ranks([example], [[Passage("1", "", text)]]),
                   lambda: FAMILIES["regex"].metrics([text], [example], None, EvalConfig())):
        with pytest.raises(DataError, match="answers of question 'q7': the regular expression"):
            scored()
