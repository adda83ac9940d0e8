"""Data of a workdir: made once, read back as written, finished after a crash."""

import contextlib
import json
import os
import shutil
import sys
from types import SimpleNamespace

import pytest

from rag_jax import files as files_module
from rag_jax.config import Config, ConfigError
from rag_jax.config.overrides import replace
from rag_jax.data import prepare as preparing
from rag_jax.data import prepared as opened
from rag_jax.data import tfds_data
from rag_jax.data.batches import ENCODER_TABLE, PASSAGE_TABLE
from rag_jax.data.prepare import chunked, prepare
from rag_jax.data.prepared import StoreTexts, open_prepared
from rag_jax.data.question_files import Example
from rag_jax.data.text import GeneratorFormat, Tokenizer, encoder_input
from rag_jax.errors import DataError
from rag_jax.retrieval.protocol import Passage

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


@pytest.fixture
def settled(monkeypatch):
    """A file that has just changed is not read once more."""
    monkeypatch.setattr(preparing.inputs, "_SETTLED_NS", -1)


def files(folder):
    return {str(f.relative_to(folder)): (f.read_bytes(), f.stat().st_mtime_ns)
            for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("stream", [None, SimpleNamespace(write=print, flush=print)])
def test_data_are_prepared_whatever_stands_in_the_place_of_stderr(tmp_path, monkeypatch, stream):
    """A bar asked it whether it was a terminal, and TFDS too."""
    monkeypatch.setattr(sys, "stderr", stream)
    assert prepare(own_config(tmp_path), tmp_path / "work").splits["dev"][0].question


def test_writing_passages_shows_progress(own, tmp_path, monkeypatch):
    """Writing the store of millions of passages said nothing for an hour."""
    prepared, seen = prepare(*own), []

    class Bar(contextlib.nullcontext):
        def __init__(self, **settings):
            super().__init__(self)
            assert settings["unit"] == " passages"

        update = staticmethod(seen.append)

    monkeypatch.setattr(preparing, "tqdm", Bar)
    preparing.write_passages(tmp_path / "s", prepared.stores["passages"], own[0],
                           prepared.retriever_tokenizer, prepared.format)
    assert sum(seen) == len(prepared.stores["passages"])


def test_own_data_are_read_back_as_they_were_written(own):
    prepared = prepare(*own)
    store = prepared.stores["passages"]
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
    store = prepared.stores["passages"]
    titles, texts = [p[1] for p in PASSAGES], [p[2] for p in PASSAGES]
    made = {PASSAGE_TABLE: prepared.format.passages(titles, texts),
            ENCODER_TABLE: encoder_input(prepared.retriever_tokenizer, titles, texts, 16)}
    for name, rows in made.items():
        assert [store.tokens(name).row(r).tolist() for r in range(4)] == rows
    assert prepared.format.max_length == 64
    assert prepared.generator_tokenizer.decode(prepared.generator_tokenizer.encode(["Ü"])[0]) == "Ü"


def test_a_second_call_changes_nothing(own, settled):
    before = files(own[1])
    prepare(*own)
    assert files(own[1]) == before


def test_data_without_digests_are_said_once_to_be_unverified(own, tmp_path, caplog):
    """`evaluate` and `generate` took what an earlier version, or anybody, had left unverified."""
    work = tmp_path / "work"
    shutil.copytree(own[1], work)
    folder_of(work, "digests.json").unlink()
    open_prepared(own[0], work)
    open_prepared(own[0], work)
    said, = caplog.messages
    assert str(work) in said and "not verified" in said
    prepare(own[0], work)
    assert folder_of(work, "digests.json").exists() and len(caplog.messages) == 1


def test_prepared_data_do_not_need_their_sources_any_more(own):
    config, work = own
    gone = replace(config, {f"data.{n}": "gone.tsv" for n in ("passages", "train", "dev")})
    assert len(prepare(gone, work).splits["train"]) == 2


def test_passages_in_the_tokens_of_an_earlier_version_are_read_no_further(own, monkeypatch):
    """They would be trained on beside questions in those of this version."""
    config, folder = own
    monkeypatch.setattr(GeneratorFormat, "passages", lambda self, titles, texts: [[5, 6]])
    stores = open_prepared(config, folder).stores
    with pytest.raises(ConfigError, match="passages: an earlier version of rag_jax wrote its pass"):
        stores["passages"]


@pytest.mark.parametrize("lost", [
    ["names.txt"],
    ["names.txt", "questions"],
    ["names.txt", "questions", "memories"],
    ["names.txt", "questions", "memories", "generator_tokenizer"],
    ["names.txt", "questions", "memories", "generator_tokenizer", "retriever_tokenizer"],
])
def test_a_crash_between_two_steps_is_made_good(own, settled, tmp_path, lost):
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
    store = prepare(config, tmp_path / "work").stores["passages"]
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
    world = build_world(10, 3)
    prepared = prepare(config, tmp_path, world=build_world)
    assert list(prepared.stores)[0] == NOW and set(prepared.stores) == set(world.passages)
    assert prepared.splits == world.splits
    assert list(prepared.warmup_texts) == [" ".join(t.split()) for t in world.warmup_texts]
    for name, memory in world.passages.items():
        store = prepared.stores[name]
        assert [store[row] for row in range(len(store))] == memory
    assert StoreTexts(prepared.stores[NOW])[3] == world.passages[NOW][3].text


def test_without_files_of_passages_something_must_make_the_world(tmp_path):
    """`prepare` from Python without a world would end in a TypeError, or leave half a folder."""
    with pytest.raises(ConfigError, match="config.data.passages is empty"):
        prepare(Config(), tmp_path / "work")
    assert not (tmp_path / "work").exists()


def folder_of(work, name):
    return work / "data" / name


def texts(prepared):
    store = prepared.stores["passages"]
    return [store[row].text for row in range(len(store))]


def write_passages(folder, passages):
    rows = ["id\ttext\ttitle", *(f"{i}\t{text}\t{title}" for i, title, text in passages)]
    (folder / "passages.tsv").write_text("\n".join(rows) + "\n", "utf-8")


@pytest.mark.parametrize("mended", ["passage", "question"])
def test_a_failed_preparation_leaves_nothing_that_the_next_one_takes_for_good(tmp_path, mended):
    """Question q2 names passage 61. Once it is there and passage 1 is corrected, or the question
    names none, the old passages must not come back."""
    config = own_config(tmp_path)
    write_jsonl(tmp_path / "train.jsonl", [TRAIN[0], {**TRAIN[1], "positive_ids": ["61"]}])
    with pytest.raises(ConfigError, match="'61'"):
        prepare(config, tmp_path / "work")
    corrected = [("1", "Peru", "Lima is the capital of the Republic of Peru."), *PASSAGES[1:]]
    if mended == "passage":
        write_passages(tmp_path, [*corrected, ("61", "New", "It is there.")])
    else:
        write_passages(tmp_path, corrected)
        write_jsonl(tmp_path / "train.jsonl", TRAIN)
    prepared = prepare(config, tmp_path / "work")
    expected = [text for _, _, text in corrected] + ["It is there."] * (mended == "passage")
    assert texts(prepared) == expected
    fresh = prepare(config, tmp_path / "fresh")
    assert fresh.generator_tokenizer.encode(expected) == prepared.generator_tokenizer.encode(
        expected), "the tokenizer is trained on the passages too"


def test_what_a_failed_preparation_made_of_nobody_knows_what_is_made_again(done, tmp_path):
    """Without a record, as earlier versions left it, the old passages came back; and where the
    workdir was somebody's folder, what has no mark of ours was removed."""
    config, work = done
    (folder_of(work, "memories") / "thesis.tex").write_text("years")
    for name in ("names.txt", "inputs.json"):
        (work / "data" / name).unlink()
    write_passages(tmp_path, [("1", "Peru", "Corrected."), *PASSAGES[1:]])
    assert texts(prepare(config, work))[0] == "Corrected."
    assert (folder_of(work, "earlier-memories") / "thesis.tex").read_text() == "years"


@pytest.fixture
def done(own, tmp_path):
    """(config, workdir) prepared from files of this test's own."""
    config = own_config(tmp_path)
    shutil.copytree(own[1], tmp_path / "work")
    prepare(config, tmp_path / "work")
    return config, tmp_path / "work"


@pytest.mark.parametrize("changed", ["passages.tsv", "train.jsonl", "dev.jsonl"])
def test_changed_files_are_read_again_while_nothing_is_trained(done, tmp_path, changed, capsys):
    config, work = done
    if changed == "passages.tsv":
        write_passages(tmp_path, PASSAGES[::-1])
    else:
        write_jsonl(tmp_path / changed, [{"question": "New?", "answers": ["yes"]}])
    before = files(folder_of(work, "memories"))
    prepared = prepare(config, work)
    assert str(tmp_path / changed) in capsys.readouterr().out
    if changed == "passages.tsv":
        assert texts(prepared) == [text for _, _, text in PASSAGES[::-1]]
    else:
        assert prepared.splits[changed.removesuffix(".jsonl")][0].question == "New?"
        assert files(folder_of(work, "memories")) == before, "which may be of 21 million passages"
    assert prepare(config, work).splits == prepared.splits
    assert "again" not in capsys.readouterr().out


@pytest.mark.parametrize("use", ["rag_token/4", "retriever/6", "indexes/passages"])
def test_changed_files_are_refused_once_something_is_made_of_them(done, tmp_path, use):
    """Half a run on other data would be a run on no data that anybody has."""
    config, work = done
    (work / use).mkdir(parents=True)
    before = files(work)
    content = (tmp_path / "train.jsonl").read_bytes()
    write_jsonl(tmp_path / "train.jsonl", TRAIN[:1])
    with pytest.raises(ConfigError) as error:
        prepare(config, work)
    folder = use.partition("/")[0]
    assert f"{work}: {folder} were made from other data" in str(error.value)
    assert f"train: {tmp_path / 'train.jsonl'}" in str(error.value)
    assert "dev.jsonl" not in str(error.value) and "another --workdir" in str(error.value)
    assert files(work) == before
    (tmp_path / "train.jsonl").write_bytes(content)
    assert len(prepare(config, work).splits["train"]) == 2, "restored, with another time"


def test_other_test_questions_are_taken_after_training(done, tmp_path):
    """Nothing is trained on them; results are measured anew."""
    config = replace(done[0], {"data.test": str(tmp_path / "test.jsonl")})
    write_jsonl(tmp_path / "test.jsonl", DEV)
    prepare(config, tmp_path / "other")
    (tmp_path / "other" / "rag_token" / "4").mkdir(parents=True)
    write_jsonl(tmp_path / "test.jsonl", [{"question": "New?", "answers": ["yes"]}])
    assert prepare(config, tmp_path / "other").splits["test"][0].question == "New?"


def test_a_file_in_the_place_of_one_of_the_same_size_and_time_is_read(done, tmp_path):
    """The questions of the file before were answered: archives set the times of their files."""
    config, work = done
    file = tmp_path / "train.jsonl"
    os.utime(file, ns=(0, 10**18))
    prepare(config, work)
    file.write_text(file.read_text().replace("Peru", "Cuba"))
    os.utime(file, ns=(0, 10**18))
    questions = [one.question for one in prepare(config, work).splits["train"]]
    assert any("Cuba" in question for question in questions)


@pytest.mark.parametrize("damaged", ["test.jsonl", "train.jsonl"])
def test_files_that_cannot_be_read_leave_what_was_made_of_the_earlier_ones(done, tmp_path, damaged):
    """The trained workdir could not be opened any more, and was told to go on training."""
    config, work = replace(done[0], {"data.test": str(tmp_path / "test.jsonl")}), tmp_path / "other"
    write_jsonl(tmp_path / "test.jsonl", DEV)
    earlier = prepare(config, work).splits["test"]
    (work / "rag_token" / "4").mkdir(parents=True)
    if damaged == "test.jsonl":
        (tmp_path / "test.jsonl").write_text("{")
    else:
        (tmp_path / "train.jsonl").unlink()
        write_jsonl(tmp_path / "test.jsonl", [{"question": "New?", "answers": ["yes"]}])
    with pytest.raises((DataError, FileNotFoundError), match=damaged):
        prepare(config, work)
    assert preparing.inputs.is_prepared(work)
    assert open_prepared(config, work).splits["test"] == earlier


def test_contents_are_compared_and_not_times(done, settled, tmp_path, monkeypatch):
    """A copied or touched file is the same one; one that has not been touched is not read."""
    config, work = done
    for name in ("passages.tsv", "train.jsonl", "dev.jsonl"):
        os.utime(tmp_path / name, ns=(0, 10**18))
    before = files(folder_of(work, "memories"))
    prepare(config, work)
    assert files(folder_of(work, "memories")) == before
    monkeypatch.setattr(preparing.inputs.hashlib, "file_digest",
                        lambda *_: pytest.fail("read again"))
    prepare(config, work)


def test_other_fields_and_tokenizers_make_other_data(done, own, tmp_path):
    config, work = done
    longer = replace(config, {"data.max_passage_length": 32})
    rows = prepare(longer, work).stores["passages"].tokens(ENCODER_TABLE)
    assert max(len(rows.row(row)) for row in range(4)) > 16
    named = replace(longer, {"data.generator_tokenizer": str(tmp_path / "named")})
    Tokenizer.load(own[1] / "data" / "retriever_tokenizer").save(tmp_path / "named")
    tokenizer = prepare(named, work).generator_tokenizer
    assert tokenizer.vocab_size == prepare(*own).retriever_tokenizer.vocab_size


@pytest.mark.parametrize("others", [{}, {"tokenizer_config.json": "{}"}])
def test_a_sentencepiece_model_is_compared_where_the_record_has_it(tmp_path, others):
    """Another one in its place was not noticed. Records of earlier versions say nothing of it, and
    their workdirs still open."""
    def record(earlier=None):
        return preparing.inputs.describe(Config(), {"generator_tokenizer": tmp_path}, earlier)

    for name, text in others.items():
        (tmp_path / name).write_text(text)
    before = record()
    (tmp_path / "spiece.model").write_text("one")
    now = record(before)
    assert preparing.inputs.differences(before, now) == {}, "an earlier version's"
    (tmp_path / "spiece.model").write_text("another")
    assert "spiece.model" in preparing.inputs.differences(now, record(now))["generator_tokenizer"]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_what_is_read_beside_a_tokenizer_file_is_compared_where_the_record_has_it(tmp_path, name):
    """Another chat template made other inputs, and the workdir's were gone on with."""
    def record(earlier=None):
        return preparing.inputs.describe(
            Config(), {"generator_tokenizer": tmp_path / "tokenizer.json"}, earlier)

    (tmp_path / "tokenizer.json").write_text("{}")
    before = record()
    (tmp_path / name).write_text('{"eos_token": "one"}')
    now = record(before)
    assert preparing.inputs.differences(before, now) == {}, "an earlier version's"
    (tmp_path / name).write_text('{"eos_token": "two"}')
    assert name in preparing.inputs.differences(now, record(now))["generator_tokenizer"]


def test_files_that_an_operating_system_writes_are_no_change(tmp_path):
    """A folder that was looked at was another one, and its workdir could not be trained on."""
    def record(earlier=None):
        return preparing.inputs.describe(
            replace(Config(), {"data.passages": str(tmp_path), "data.train": str(tmp_path)}),
            {}, earlier)

    (tmp_path / "p.parquet").write_text("p")
    before = record()
    for name in (".DS_Store", "._p.parquet", ".cache/p.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert preparing.inputs.differences(before, record(before)) == {}
    assert preparing.inputs.differences(record(before), before) == {}, "an earlier version's"
    (tmp_path / "q.parquet").write_text("q")
    assert preparing.inputs.differences(before, record(before)).keys() == {"passages", "train"}


@pytest.mark.parametrize("split", ["train", "train[:50%]"])
def test_a_tfds_folder_is_compared_by_its_files_and_its_split(tmp_path, split):
    """Of a slice no file was recorded, and of other splits nothing: others went unnoticed."""
    def record(split=split):
        return preparing.inputs.describe(
            replace(Config(), {"data.passages": str(tmp_path / "p.tsv"),
                               "data.train": f"tfds-dir:{tmp_path / 'made'}:{split}"}), {})

    def changes(then):
        return {*preparing.inputs.differences(then, record())} - {"passages"}

    (tmp_path / "p.tsv").write_text("id\ttext\ttitle\n1\tLima\tPeru\n")
    examples = [Example(str(i), f"{i}?", ("a",)) for i in range(4)]
    tfds_data.prepare_dataset("made", {"train": examples, "dev": examples[:2]}, tmp_path / "made")
    before = record()
    assert changes(before) == set()
    assert changes(record("dev")) == changes(record("train[:20%]")) == {"train"}
    for earlier in ({"source": ""}, {"source": f"tfds-dir:/elsewhere:{split}", "files": {}}):
        said = {**before["inputs"], "train": {**before["inputs"]["train"], **earlier}}
        assert changes({**before, "inputs": said}) == set(), "an earlier version's"
    tfds_data.prepare_dataset("made", {"train": examples[::-1], "dev": examples[:2]},
                              tmp_path / "made")
    assert changes(before) == {"train"}


def test_a_file_that_changes_while_it_is_read_is_no_input(tmp_path, monkeypatch):
    """The store would be of one version and the record of another."""
    config = own_config(tmp_path)
    write = preparing.write_passages

    def changing(*arguments):
        with (tmp_path / "passages.tsv").open("a") as file:
            file.write("late\tIt comes late.\tLate\n")
        return write(*arguments)

    monkeypatch.setattr(preparing, "write_passages", changing)
    with pytest.raises(ConfigError, match="changed while they were read.*passages.tsv"):
        prepare(config, tmp_path / "work")
    monkeypatch.setattr(preparing, "write_passages", write)
    assert texts(prepare(config, tmp_path / "work"))[-1] == "It comes late."


def test_leftovers_of_a_killed_preparation_go_at_the_next(done, tmp_path, monkeypatch):
    """Each kill left a folder for ever; what is not ours stays."""
    config, work = done
    (folder_of(work, "names.txt")).unlink()
    shutil.rmtree(folder_of(work, "questions"))
    monkeypatch.setattr(files_module, "_HOST", "gone")
    monkeypatch.setattr(files_module, "discard_folder", lambda content: None)
    monkeypatch.setattr(tfds_data, "_fill", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(config, work)
    left, = folder_of(work, ".").glob(".questions.*")
    for path in (left, *left.rglob("*")):
        os.utime(path, (0, 0))
    (folder_of(work, ".questions.mine")).mkdir()
    monkeypatch.undo()
    prepare(config, work)
    assert [path.name for path in folder_of(work, ".").glob(".*")] == [".questions.mine"]


def test_the_questions_just_written_are_those_that_are_read_back(own, tmp_path):
    """The first command would train on others than the one that takes it up once it is stopped."""
    config, _, *rest = own
    made = prepare(config, tmp_path, *rest)
    assert dict(made.splits) == dict(open_prepared(config, tmp_path).splits)


def test_questions_are_read_when_they_are_asked_for(own, monkeypatch):
    """To answer one question, all that had ever trained or tested the model were read."""
    config, workdir, *_ = own
    prepare(*own)
    read = []
    load = opened.load_examples
    monkeypatch.setattr(opened, "load_examples", lambda source: read.append(source) or
                        load(source))
    prepared = open_prepared(config, workdir)
    assert list(prepared.splits) == ["train", "dev"] and "test" not in prepared.splits
    assert read == []
    assert prepared.splits["dev"] is prepared.splits["dev"] and len(read) == 1
