"""Damage of a workdir: nothing is used that differs from its digest, and `verify` names it."""

import json
import os
import pathlib
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from rag_jax import verify
from rag_jax.config import Config
from rag_jax.data.batches import ENCODER_TABLE
from rag_jax.data.prepare import open_prepared, prepare
from rag_jax.data.tasks import load_examples
from rag_jax.errors import UserError
from rag_jax.overrides import replace, to_json
from rag_jax.retrieval.build import build_index
from rag_jax.training import workdir
from rag_jax.training.checkpoint import Checkpointer
from rag_jax.training.run import Clock
from tests.campaigns import campaign


def embed(ids, mask):
    return np.cos(ids * mask).astype(np.float32)[:, :4]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(configuration, workdir) with data, an index, a checkpoint and times; bytes are put back."""
    folder = tmp_path_factory.mktemp("verifying")
    rows = ["id\ttext\ttitle", *(f"p{i}\tLima is city {i} of Peru\tTitle {i}" for i in range(30))]
    (folder / "p.tsv").write_text("\n".join(rows) + "\n")
    question = {"question": "Which city?", "answers": ["Lima"], "positive_ids": ["p3"]}
    (folder / "q.jsonl").write_text(json.dumps(question) + "\n")
    config = replace(Config(), {
        "data.passages": str(folder / "p.tsv"), "data.train": str(folder / "q.jsonl"),
        "data.dev": str(folder / "q.jsonl"), "data.generator_vocab": 320,
        "data.retriever_vocab": 120})
    path = workdir.start(config, folder / "work")
    with Clock(path).time("data"):
        store = prepare(config, path).memories["passages"]
    build_index(store, embed, path / "indexes" / "passages", token_table=ENCODER_TABLE,
                encoder_fingerprint="e", max_length=8, batch_size=8, length_buckets=(8,),
                kind="exact", recall_k=2)
    workdir.begin_run(path, "rag_token", config.eval)
    with Checkpointer(path / "rag_token") as checkpointer:
        checkpointer.save(3, {"a": {"b": jnp.arange(500.0)}}, {"m": (jnp.ones(7),)}, {"x": 1},
                          wait=True)
    return config, path


def flip(file, rng):
    whole = bytearray(file.read_bytes())
    place = rng.randrange(len(whole))
    changed = whole.copy()
    changed[place] ^= 1 << rng.randrange(8)
    file.write_bytes(changed)
    return lambda: file.write_bytes(whole)


def files_of(folder):
    return sorted(f for f in folder.rglob("*") if f.is_file() and f.stat().st_size)


@pytest.mark.parametrize("count", campaign.counts(12, 100))
def test_no_flipped_byte_of_prepared_data_is_silent(made, count):
    """38 of 99 were: a question, a token of a tokenizer, a number in dataset_info.json."""
    config, path = made
    files = files_of(path / "data")
    assert {"dataset_info.json", "tokenizer.json", "names.txt", "digests.json", "inputs.json"} < {
        file.name for file in files}

    def case(rng):
        file = rng.choice(files)
        restore = flip(file, rng)
        try:
            with pytest.raises(UserError, match=file.name):
                prepare(config, path)
        finally:
            restore()
        return "detected"

    assert campaign.run("flips-data", count, case) == {"detected": count}


@pytest.mark.parametrize("read, name", [
    (workdir.read, "config.json"), (Clock, "seconds.json"),
    (lambda path: workdir.eval_of(path, "rag_token"), "rag_token/eval.json")])
@pytest.mark.parametrize("count", campaign.counts(60, 300))
def test_no_flipped_byte_of_a_json_file_is_silent(made, count, read, name):
    """Another learning rate in config.json was taken for what the workdir was trained with."""
    path = made[1]
    before = json.loads((path / name).read_text())

    def case(rng):
        restore = flip(path / name, rng)
        try:
            with pytest.raises(UserError, match=name):
                read(path)
            return "detected"
        except pytest.fail.Exception:
            changed = json.loads((path / name).read_text())
            return "white space" if changed == before else "silent"
        finally:
            restore()

    outcomes = campaign.run(f"flips-{name.replace('/', '-')}", count, case)
    assert not outcomes["silent"] and outcomes["detected"] > count // 2


def test_links_in_a_workdir_that_was_handed_over_are_not_followed(made, tmp_path):
    """A workdir must not make its reader open other files, nor wait at a pipe for ever."""
    config, path = made[0], shutil.copytree(made[1], tmp_path / "w")
    (path / "data" / "digests.json").unlink()
    tokenizer = path / "data" / "generator_tokenizer" / "tokenizer.json"
    tokenizer.rename(tmp_path / "t.json")
    tokenizer.symlink_to(tmp_path / "t.json")
    with pytest.raises(UserError, match="tokenizer.json is a link"):
        open_prepared(config, path)
    array = max((path / "rag_token" / "3" / "params").rglob("d/*"), key=lambda f: f.stat().st_size)
    array.unlink()
    os.mkfifo(array)
    with Checkpointer(path / "rag_token", read_only=True) as checkpointer:
        with pytest.raises(UserError, match=f"{array.name} is a link or no regular file"):
            checkpointer.verify(3)


def test_data_sets_cannot_have_modules_imported(made, tmp_path, monkeypatch):
    """TFDS imports the modules that features.json names, also from the current folder."""
    path = shutil.copytree(made[1] / "data" / "questions", tmp_path / "q")
    (tmp_path / "evil.py").write_text("import os; os.mkdir('hacked')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    whole = (path / "features.json").read_text()
    assert load_examples(f"tfds-dir:{path}:dev")
    name = next(n for n in re.findall(r'"(tensorflow_datasets[^"]*)"', whole) if "Text" in n)
    for text in (whole.replace(name, "evil.Text"), '{"type": "evil.X", "content": ""}',
                 "[" * 10**5):
        (path / "features.json").write_text(text)
        with pytest.raises(UserError, match="features.json"):
            load_examples(f"tfds-dir:{path}:dev")
    assert not (tmp_path / "hacked").exists()


def test_a_configuration_of_an_earlier_version_or_a_hand_is_read(tmp_path):
    (tmp_path / "config.json").write_text(to_json(replace(Config(), {"seed": 5})))
    assert workdir.read(tmp_path).seed == 5


def test_data_whose_digests_a_kill_prevented_get_them(made):
    config, path = made
    file = path / "data" / "digests.json"
    whole = file.read_bytes()
    file.unlink()
    for name in (".DS_Store", ".questions.rag_jax-x", "notes (copy).txt"):  # none of ours
        (path / "data" / "questions" / name).touch()
    assert open_prepared(config, path).splits["dev"]  # only reads
    assert not file.exists()
    prepare(config, path)
    assert file.read_bytes() == whole


def test_a_sound_workdir_index_or_store_is_said_to_be_sound(made, capsys):
    path = made[1]
    for part in ("", "indexes/passages", "data/memories/passages"):
        assert verify.main([str(path / part)]) == 0
        printed = capsys.readouterr()
        assert "sound" in printed.out and "DAMAGED" not in printed.out and not printed.err
    verify.main([str(path)])
    printed = capsys.readouterr().out
    for name in ("config.json", "seconds.json", "data:", "memories/passages", "indexes/passages",
                 "rag_token/3"):
        assert name in printed


def test_every_damaged_file_is_named(made, tmp_path, capsys):
    """Also where one is damaged before the other, and where an array of a checkpoint is."""
    path = shutil.copytree(made[1], tmp_path / "w")
    arrays = max((path / "rag_token" / "3" / "params").rglob("d/*"), key=lambda f: f.stat().st_size)
    damaged = ["config.json", "seconds.json", "rag_token/eval.json",
               "data/generator_tokenizer/tokenizer.json",
               "data/questions/dataset_info.json", "data/memories/passages/text.blob",
               "data/memories/passages/text.offsets", "indexes/passages/embeddings.f32",
               "indexes/passages/passages/text.blob", arrays.relative_to(path).as_posix()]
    if not (path / damaged[7]).exists():  # a version of the index lies below it
        inside = next(path.glob("indexes/passages/**/embeddings.f32")).parent
        damaged[7:9] = [(inside / name).relative_to(path).as_posix()
                        for name in ("embeddings.f32", "passages/text.blob")]
    for name in damaged:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 4
        (path / name).write_bytes(data)
    assert verify.main([str(path)]) == 1
    errors = capsys.readouterr().err
    for name in damaged[:-1]:
        assert str(path / name) in errors, name
    assert "step 3" in errors


def test_what_is_neither_index_nor_store_nor_workdir_is_an_error(tmp_path):
    for path in (tmp_path, tmp_path / "nothing", pathlib.Path(__file__)):
        with pytest.raises(UserError, match="neither an index nor"):
            verify.main([str(path)])
