"""Data of a workdir: made once, read back as written, finished after a crash."""

import json
import os
import shutil

import pytest

from rag_jax.config import Config, ConfigError
from rag_jax.data import prepare as preparing
from rag_jax.data.batches import ENCODER_TABLE, PASSAGE_TABLE
from rag_jax.data.prepare import chunked, prepare
from rag_jax.data.question_files import Example
from rag_jax.data.text import Tokenizer, encoder_input
from rag_jax.overrides import replace
from rag_jax.retrieval.reading import Passage

LONG = " ".join(f"word{i}" for i in range(25))
PASSAGES = [("1", "Peru", "Lima is the capital of Peru."), ("2", "Chile", "Santiago."),
            ("long", "Words", LONG), ("ü", "", "Ünïcode « text » here.")]
TRAIN = [
    {"id": "q1", "question": "Capital of Peru?", "answers": ["Lima", "Ciudad"],
     "positive_ids": ["1"], "hard_negative_ids": ["2"]},
    {"id": "q2", "question": "Ünï?", "answers": ["ü"], "positive_ids": ["ü"]},
]
DEV = [{"question": "Capital of Chile?", "answers": ["Santiago"]}]


def write_jsonl(path, records):
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n", "utf-8")


def own_config(folder, **changes):
    rows = ["id\ttext\ttitle", *(f"{i}\t{text}\t{title}" for i, title, text in PASSAGES)]
    (folder / "passages.tsv").write_text("\n".join(rows) + "\n", "utf-8")
    write_jsonl(folder / "train.jsonl", TRAIN)
    write_jsonl(folder / "dev.jsonl", DEV)
    return replace(Config(), {
        "data.passages": str(folder / "passages.tsv"), "data.train": str(folder / "train.jsonl"),
        "data.dev": str(folder / "dev.jsonl"), "data.generator_vocab": 320,
        "data.retriever_vocab": 120, "data.max_source_length": 64, "data.max_passage_length": 16,
        **changes})


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """(config, workdir) with its data prepared; not to be changed."""
    folder = tmp_path_factory.mktemp("own")
    config = own_config(folder)
    prepare(config, folder / "work")
    return config, folder / "work"


def files(folder):
    return {str(f.relative_to(folder)): (f.read_bytes(), f.stat().st_mtime_ns)
            for f in folder.rglob("*") if f.is_file()}


def test_own_data_are_read_back_as_they_were_written(own):
    prepared = prepare(*own)
    store = prepared.memories["passages"]
    assert [tuple(store[row]) for row in range(len(store))] == PASSAGES
    assert list(prepared.splits) == ["train", "dev"]
    first, second = prepared.splits["train"]
    assert first == Example("q1", "Capital of Peru?", ("Lima", "Ciudad"), ("1",), ("2",))
    assert second == Example("q2", "Ünï?", ("ü",), ("ü",), ())
    assert prepared.splits["dev"][0][:3] == ("1", "Capital of Chile?", ("Santiago",))
    assert list(prepared.warmup_texts) == [text for _, _, text in PASSAGES]
    assert len(prepared.warmup_texts) == 4


def test_token_tables_are_made_with_the_tokenizers_and_lengths_of_the_workdir(own):
    prepared = prepare(*own)
    store = prepared.memories["passages"]
    titles, texts = [p[1] for p in PASSAGES], [p[2] for p in PASSAGES]
    made = {PASSAGE_TABLE: prepared.format.passages(titles, texts),
            ENCODER_TABLE: encoder_input(prepared.retriever_tokenizer, titles, texts, 16)}
    for name, rows in made.items():
        assert [store.tokens(name).rows(r).tolist() for r in range(4)] == rows
    assert prepared.format.max_length == 64
    assert prepared.generator_tokenizer.decode(prepared.generator_tokenizer.encode(["Ü"])[0]) == "Ü"


def test_a_second_call_changes_nothing(own):
    before = files(own[1])
    prepare(*own)
    assert files(own[1]) == before


def test_prepared_data_do_not_need_their_sources_any_more(own):
    config, work = own
    gone = replace(config, {f"data.{n}": "gone.tsv" for n in ("passages", "train", "dev")})
    assert len(prepare(gone, work).splits["train"]) == 2


@pytest.mark.parametrize("lost", [
    ["names.txt"],
    ["names.txt", "questions"],
    ["names.txt", "questions", "memories"],
    ["names.txt", "questions", "memories", "generator_tokenizer"],
    ["names.txt", "questions", "memories", "generator_tokenizer", "retriever_tokenizer"],
])
def test_a_crash_between_two_steps_is_made_good(own, tmp_path, lost):
    config, work = own
    shutil.copytree(work, tmp_path / "work")
    for name in lost:
        path = tmp_path / "work" / "data" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    prepare(config, tmp_path / "work")
    whole, again = files(work), files(tmp_path / "work")
    assert set(whole) == set(again)
    kept = [n for n in whole if not n.startswith("data/questions/")]  # holds its own checksums
    assert {n: whole[n][0] for n in kept} == {n: again[n][0] for n in kept}
    assert prepare(config, tmp_path / "work").splits == prepare(config, work).splits


def test_a_kill_while_the_last_file_is_written_leaves_no_half_of_it(own, tmp_path, monkeypatch):
    """An empty names.txt would pass for finished and could not be read."""
    config, work = own
    shutil.copytree(work, tmp_path / "work")
    (tmp_path / "work" / "data" / "names.txt").unlink()
    rename = os.replace

    def killed(path, target):
        if target.name == "names.txt":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, tmp_path / "work")
    assert list(prepare(config, tmp_path / "work").splits) == ["train", "dev"]


@pytest.mark.parametrize("field", ["positive_ids", "hard_negative_ids"])
def test_a_passage_that_is_not_there_names_file_question_and_id(tmp_path, field):
    config = own_config(tmp_path)
    write_jsonl(tmp_path / "train.jsonl", [TRAIN[0], {**TRAIN[1], "positive_ids": ["1"],
                                                      field: ["missing"]}])
    with pytest.raises(ConfigError) as error:
        prepare(config, tmp_path / "work")
    for told in (config.data.train, "'q2'", "'missing'"):
        assert told in str(error.value)
    assert not (tmp_path / "work" / "data" / "names.txt").exists()


def test_a_damaged_question_file_is_named_before_anything_is_made(tmp_path):
    config = own_config(tmp_path)
    (tmp_path / "dev.jsonl").write_text('{"question": "x"}\n')
    with pytest.raises(ValueError, match="dev.jsonl:1"):
        prepare(config, tmp_path / "work")
    assert not (tmp_path / "work" / "data").exists()


def test_regular_expressions_train_by_their_targets_alone(tmp_path):
    """A pattern is no text that a generator should learn to write; dev asks for none."""
    config = own_config(tmp_path)
    pattern = {"id": "r", "question": "Capital?", "answers": ["Li.a"], "regex": True}
    write_jsonl(tmp_path / "dev.jsonl", [pattern])
    write_jsonl(tmp_path / "train.jsonl", [*TRAIN, pattern])
    with pytest.raises(ConfigError, match=r"train.jsonl: question 'r' .* no targets to train on"):
        prepare(config, tmp_path / "work")
    write_jsonl(tmp_path / "train.jsonl", [*TRAIN, {**pattern, "targets": ["Lima"]}])
    splits = prepare(config, tmp_path / "work").splits
    assert splits["train"][2].targets == ("Lima",) and splits["dev"][0].regex


@pytest.mark.parametrize("task, name, rows, targets", [
    ("curated_trec", "CuratedTrec-train.txt",
     [{"question": "What is the capital of Peru?", "answer": ["l.ma|Bogot."]},
      {"question": "What is Chile's capital?", "answer": ["Val(paraiso)?"]},
      {"question": "How many?", "answer": [r"\d{4}"]}],
     [("Lima",), ("Valparaiso", "Val")]),
    ("trivia_qa", "trivia-train.qa.csv",
     "Capital of Peru?\t['Lima', 'Ciudad de los Reyes']\nChile?\t['Nowhere', 'Elsewhere']\n",
     [("Lima",), ("Nowhere",)]),
])
def test_what_trains_is_looked_for_in_the_passages(tmp_path, task, name, rows, targets):
    """Appendix D of the paper, by BM25 over the memory; what counts as right does not change."""
    config = replace(own_config(tmp_path), {
        "data.train": f"task:{task}:{'train' if task == 'curated_trec' else 'dpr_train'}",
        "data.data_dir": str(tmp_path)})
    (tmp_path / task).mkdir()
    if isinstance(rows, str):
        (tmp_path / task / name).write_text(rows, "utf-8")
    else:
        write_jsonl(tmp_path / task / name, rows)
    with pytest.warns(UserWarning, match="questions where"):
        train = prepare(config, tmp_path / "work").splits["train"]
    assert [example.targets for example in train] == targets
    assert not set(targets) & {example.answers for example in train}
    assert not (tmp_path / "work" / "data" / "bm25").exists()


def test_chunks_are_numbered_and_whole_passages_keep_their_ids(tmp_path):
    config = own_config(tmp_path, **{"data.chunk_words": 10})
    store = prepare(config, tmp_path / "work").memories["passages"]
    ids = [store[row].id for row in range(len(store))]
    assert ids == ["1", "2", "long.0", "long.1", "long.2", "ü"]
    assert " ".join(store[row].text for row in (2, 3, 4)) == LONG
    assert {store[row].title for row in (2, 3, 4)} == {"Words"}


def test_chunked_with_zero_words_leaves_passages_as_they_are():
    passages = [Passage("a", "T", "x  y\nz"), Passage("b", "", "w")]
    assert list(chunked(passages, 0)) == passages
    assert list(chunked(passages, 2)) == [Passage("a.0", "T", "x y"), Passage("a.1", "T", "z"),
                                          Passage("b", "", "w")]


def test_a_named_tokenizer_is_used_and_none_is_trained(own, tmp_path):
    _, work = own
    config = own_config(tmp_path, **{
        "data.generator_tokenizer": str(work / "data" / "generator_tokenizer")})
    prepared = prepare(config, tmp_path / "work")
    reference = Tokenizer.load(work / "data" / "generator_tokenizer")
    assert prepared.generator_tokenizer.encode([LONG]) == reference.encode([LONG])
    assert (tmp_path / "work" / "data" / "generator_tokenizer" / "tokenizer.json").is_file()


def test_the_world_of_countries_is_read_back_as_it_was_built(tmp_path):
    from rag_jax.countries.world import NOW, build_world

    config = replace(Config(), {"data.fictional_countries": 10, "seed": 3,
                                "data.generator_vocab": 600, "data.retriever_vocab": 600})
    prepared, world = prepare(config, tmp_path), build_world(10, 3)
    assert list(prepared.memories)[0] == NOW and set(prepared.memories) == set(world.memories)
    assert prepared.splits == world.splits
    assert list(prepared.warmup_texts) == [" ".join(t.split()) for t in world.warmup_texts]
    for name, memory in world.memories.items():
        store = prepared.memories[name]
        assert [store[row] for row in range(len(store))] == memory
    assert preparing.StoreTexts(prepared.memories[NOW])[3] == world.memories[NOW][3].text
