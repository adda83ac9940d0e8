"""What `generate` passes on, prints and writes; the model is a stub."""

import io
import json
import re
import subprocess
from types import SimpleNamespace

import pytest

from rag_jax import api, files
from rag_jax.cli import display, evaluate, flags, generate
from rag_jax.config import Config
from rag_jax.decoding.settings import Decoding
from rag_jax.errors import UserError
from rag_jax.types import Answer, Evidence

QUESTIONS = ["Who?", "Where?", "When?"]


@pytest.fixture
def asked(monkeypatch):
    """The configurations with which a run was opened; it answers with the number of the question,
    proved for the first and given up for the others."""
    opened = []

    def answer(questions):
        return [Answer(f"answer {QUESTIONS.index(q)}", [5, 2], -0.5,
                       [Evidence("", "", "", 1.0, 1.0)],
                       [-0.25, -0.25], [[1.0], [1.0]], certified=q == "Who?", expanded=7,
                       alternatives=[Answer("other", [6, 2], -2.0, [])], tokens=["5", "2"])
                for q in ([questions] if isinstance(questions, str) else questions)]

    def load(*_, config, **__):
        opened.append(config)
        return SimpleNamespace(ask=answer, ask_each=answer, answers=True, answerer=lambda: (
            SimpleNamespace(decoding=Decoding(min_length=config.eval.min_length or 0))),
            matches=lambda question: True)

    monkeypatch.setattr(flags, "workdir_config", lambda options: Config())
    monkeypatch.setattr(api, "load", load)
    return opened


def test_exact_sets_the_nodes_unless_they_are_set(asked, capsys):
    for argv in ([], ["--exact"], ["--exact", "--config.eval.exact_nodes=3"]):
        generate.main(["Who?", "Where?", *argv])
    assert [config.eval.exact_nodes for config in asked] == [0, generate.EXACT_NODES, 3]
    proved, given_up, *_ = (line for line in capsys.readouterr().out.splitlines()
                            if "answer" in line)
    claim = "no other answer has a higher probability under the model"
    assert claim in proved and "may have" not in proved
    assert "another answer may have a higher probability (7 prefixes searched)" in given_up


def test_a_certificate_is_of_the_answers_that_the_settings_allow(asked, capsys):
    """"No other answer" was said where a shorter one that min_length excludes was more probable."""
    for argv in (["Who?"], ["Who?", "--config.eval.min_length=3"]):
        generate.main(argv)
    free, ruled = (line for line in capsys.readouterr().out.splitlines() if "no other" in line)
    assert "no other answer has" in free and "no other answer that the settings allow has" in ruled


def test_answers_that_would_be_lost_or_mixed_are_refused(asked, tmp_path, capsys):
    with pytest.raises(SystemExit):
        generate.main(["--interactive", f"--out={tmp_path / 'answers.jsonl'}"])
    assert "--interactive answers on the terminal" in capsys.readouterr().err
    (tmp_path / "q.jsonl").write_text('{"id": "asked-1", "question": "Where?"}')
    with pytest.raises(UserError, match="has the id 'asked-1', which is that of a question"):
        generate.main(["Who?", f"--questions={tmp_path / 'q.jsonl'}"])


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert display._has_colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not display._has_colours()


def test_every_question_has_a_heat_map_of_its_own(asked, tmp_path, capsys):
    generate.main([*QUESTIONS[:2], f"--heatmap={tmp_path / 'map.html'}"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["map-1.html", "map-2.html"]
    assert "Where? answer 1" in (tmp_path / "map-2.html").read_text()
    generate.main([QUESTIONS[2], f"--heatmap={tmp_path / 'map.html'}"])
    assert "When? answer 2" in (tmp_path / "map.html").read_text()
    with pytest.raises(SystemExit):
        generate.main([*QUESTIONS, "--heatmap", f"--out={tmp_path / 'answers.jsonl'}"])
    assert "token_posterior" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [
    ["--heatmap", "Who?"], ["Who?", "--heatmap"], ["--heatmap", "--exact", "Who?"],
    ["--exact", "Who?", "--heatmap"], ["--heatmap", "--", "Who?"],
])
def test_the_order_of_arguments_does_not_matter(argv, asked, capsys):
    """`--heatmap "Who?"` took the question for the name of a file."""
    generate.main(argv)
    printed = capsys.readouterr().out
    assert "answer 0" in printed and "100" in printed, "the answer and its heat map"


def test_options_may_stand_between_questions(asked, capsys):
    """argparse refuses what comes after the option, unless it parses intermixed."""
    generate.main(["Who?", "--exact", "Where?"])
    assert "answer 0" in (printed := capsys.readouterr().out) and "answer 1" in printed


@pytest.mark.parametrize("argv, told", [
    (["--heatmap=map.pdf", "Who?"], "must end in .html or .png"),
    (["--heatmap=nowhere/map.html", "Who?"], "no folder"),
    (["--questions=nowhere.jsonl"], "nowhere.jsonl"),
    ([f"--questions={__file__}", f"--out={__file__}"], "would take the place"),
    (["Who?", " "], "question 2 is ' '"), (["\udcff"], "is not UTF-8"),
])
def test_what_cannot_be_done_fails_before_the_model_is_opened(argv, told, asked):
    with pytest.raises((UserError, OSError), match=told):
        generate.main(argv)
    assert not asked


def test_a_file_name_after_heatmap_is_no_question(asked, capsys):
    with pytest.raises(SystemExit):
        generate.main(["Who?", "--heatmap", "map.html"])
    assert "write --heatmap=map.html" in capsys.readouterr().err and not asked


def test_answers_are_scored_as_predictions(asked, tmp_path, capsys):
    """Lines of `generate --out` lacked the id and answer that `evaluate --predictions` reads."""
    questions, out = tmp_path / "test.jsonl", tmp_path / "answers.jsonl"
    questions.write_text('{"id": "a", "question": "Who?", "answers": ["answer 0"]}\n'
                         '{"question": "Where?", "answers": ["elsewhere"]}\n')
    generate.main([f"--questions={questions}", f"--out={out}"])
    evaluate.main([f"--predictions={out}", f"--questions={questions}"])
    assert re.search(r"em +50\n", capsys.readouterr().out)
    first = out.read_text()
    for argv in ([f"--questions={questions}"], ["Who?"]):  # it was written over
        generate.main([*argv, f"--out={out}"])
    assert (tmp_path / "earlier-answers.jsonl").read_text() == first != out.read_text()
    assert not (tmp_path / "earlier-answers.jsonl-2").exists(), "the same answers are no others"


def test_what_a_killed_command_left_is_removed_by_the_next(asked, tmp_path):
    """A hidden file of answers stayed for every command that had been killed."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    left = tmp_path / f".answers.jsonl.rag_jax-{files._HOST}-{ended.pid}-0123abcd"
    left.write_text("{}")
    generate.main([*QUESTIONS, f"--out={tmp_path / 'answers.jsonl'}"])
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


def test_what_data_holds_cannot_steer_the_terminal(capsys):
    """An escape sequence in a passage or an id cleared the screen, or hid what stood there."""
    evil = "\x1b[2J\u202etxt\x9b"
    answer = Answer(evil, [5], -0.5, [Evidence(evil, "", evil, 1.0, 1.0)], [-0.5], [[1.0]],
                    alternatives=[Answer(evil, [6], -2.0, [])], tokens=[evil])
    display.show(evil, answer, "terminal")
    printed = capsys.readouterr().out
    assert not set(printed) & set("\x1b\u202e\x9b")
    assert printed.count(r"\x1b[2J\u202etxt\x9b") == 7


def test_typed_bytes_that_are_no_utf8_are_told_after_the_questions_before_them(
        asked, monkeypatch, capsys):
    """They ended in a traceback, as a defect of rag_jax, and no question was answered."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Who?\ncaf\xe9?\n"), "utf-8"))
    with pytest.raises(UserError, match="is typed in another encoding than utf-8"):
        generate.main(["--interactive"])
    assert "answer 0" in capsys.readouterr().out


def test_a_file_of_answers_has_alternatives_as_objects(asked, tmp_path):
    generate.main([*QUESTIONS, f"--out={tmp_path / 'answers.jsonl'}"])
    lines = [json.loads(x) for x in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["question"] for line in lines] == QUESTIONS
    assert [line["id"] for line in lines] == ["asked-1", "asked-2", "asked-3"]
    assert lines[1]["text"] == lines[1]["answer"] == "answer 1"
    assert lines[1]["token_posterior"] == [[1.0], [1.0]]
    assert lines[0]["alternatives"][0]["text"] == "other"
    assert lines[0]["alternatives"][0]["token_ids"] == [6, 2]


def test_a_string_given_to_ask_is_one_question(monkeypatch):
    """`ask("Who is it?")` answered ten questions of a letter each."""
    job = SimpleNamespace(config=Config(), workdir="w", tokenize=lambda examples: examples)
    answerer = SimpleNamespace(
        decode_each=lambda params, tokens, rows: [e.question for e in tokens],
        retrieve=lambda params, tokens: None)
    monkeypatch.setattr(api.Rag, "answerer", lambda *_, **__: answerer)
    rag = api.Rag(job, "rag_token", {"generator": {}}, None)
    assert rag.ask("Who is it?") == ["Who is it?"]
    with pytest.raises(UserError, match="question 2"):
        rag.ask(["Who?", ""])


def test_a_place_for_the_answers_that_is_missing_is_met_first(asked, tmp_path):
    """The whole file of questions was answered, and all was lost."""
    with pytest.raises(UserError, match="no folder .*missing; make it"):
        generate.main(["Who?", f"--out={tmp_path / 'missing' / 'a.jsonl'}"])
    assert asked == [], "the model must not have been opened"


def test_answers_that_were_computed_are_kept(asked, tmp_path, monkeypatch, capsys):
    opened = api.load(config=Config())

    def fail_at_the_last(questions):
        yield from opened.ask(questions[:-1])
        raise UserError("no more")

    opened.ask_each = fail_at_the_last
    monkeypatch.setattr(api, "load", lambda *_, **__: opened)
    with pytest.raises(UserError, match="no more"):
        generate.main([*QUESTIONS, f"--out={tmp_path / 'a.jsonl'}"])
    kept, = tmp_path.iterdir()
    assert [json.loads(line)["question"] for line in kept.read_text().splitlines()] == (
        QUESTIONS[:-1])
    assert str(kept) in capsys.readouterr().err
