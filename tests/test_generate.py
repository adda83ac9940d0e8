"""What `generate` passes on, prints and writes; the model is a stub."""

import json
from types import SimpleNamespace

import pytest

from rag_jax import flags, generate, trained
from rag_jax.config import Config
from rag_jax.types import Alternative, Answer

QUESTIONS = ["Who?", "Where?", "When?"]


@pytest.fixture
def asked(monkeypatch):
    """The configurations with which a run was opened; it answers with the number of the question,
    proved for the first and given up for the others."""
    opened = []

    def answer(questions):
        return [Answer(f"answer {QUESTIONS.index(q)}", [5, 2], -0.5, [""], [1.0], [1.0],
                       [-0.25, -0.25], [[1.0], [1.0]], certified=q == "Who?", expanded=7,
                       alternatives=[Alternative("other", [6, 2], -2.0)]) for q in questions]

    def open_trained(config, *_):
        opened.append(config)
        tokenizer = SimpleNamespace(piece=str)
        return SimpleNamespace(answer=answer, index=None, job=SimpleNamespace(
            prepared=SimpleNamespace(generator_tokenizer=tokenizer)))

    monkeypatch.setattr(flags, "workdir_config", lambda options: Config())
    monkeypatch.setattr(trained, "open_trained", open_trained)
    return opened


def test_exact_sets_the_nodes_unless_they_are_set(asked, capsys):
    for argv in ([], ["--exact"], ["--exact", "--config.eval.exact_nodes=3"]):
        generate.main(["Who?", "Where?", *argv])
    assert [config.eval.exact_nodes for config in asked] == [0, generate.EXACT_NODES, 3]
    proved, given_up, *_ = (line for line in capsys.readouterr().out.splitlines()
                            if "answer" in line)
    assert "certainly the most probable" in proved and "not proved" not in proved
    assert "not proved the most probable within 7 prefixes" in given_up


def test_every_question_has_a_heat_map_of_its_own(asked, tmp_path, capsys):
    generate.main([*QUESTIONS[:2], f"--heatmap={tmp_path / 'map.html'}"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["map-1.html", "map-2.html"]
    assert "Where? answer 1" in (tmp_path / "map-2.html").read_text()
    generate.main([QUESTIONS[2], f"--heatmap={tmp_path / 'map.html'}"])
    assert "When? answer 2" in (tmp_path / "map.html").read_text()
    with pytest.raises(SystemExit):
        generate.main([*QUESTIONS, "--heatmap", f"--out={tmp_path / 'answers.jsonl'}"])
    assert "token_posterior" in capsys.readouterr().err


def test_a_file_of_answers_has_alternatives_as_objects(asked, tmp_path):
    generate.main([*QUESTIONS, f"--out={tmp_path / 'answers.jsonl'}"])
    lines = [json.loads(x) for x in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["question"] for line in lines] == QUESTIONS
    assert lines[1]["text"] == "answer 1" and lines[1]["token_posterior"] == [[1.0], [1.0]]
    assert lines[0]["alternatives"][0]["text"] == "other"
    assert lines[0]["alternatives"][0]["token_ids"] == [6, 2]
