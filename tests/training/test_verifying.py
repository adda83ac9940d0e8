"""Damage of a workdir: nothing is used that differs from its digest, and `verify` names it."""

import os
import pathlib
import re
import shutil

import numpy as np
import pytest

from rag_jax import steps
from rag_jax.cli import verify
from rag_jax.config import Config
from rag_jax.config.config_files import to_json
from rag_jax.config.overrides import replace
from rag_jax.data.prepare import prepare
from rag_jax.data.prepared import open_prepared
from rag_jax.data.question_sources import load_examples
from rag_jax.errors import UserError
from rag_jax.retrieval.bm25 import build_bm25
from rag_jax.retrieval.passages import PassageStore
from rag_jax.training import workdir
from rag_jax.training.checkpoint import Checkpointer
from tests.training import small_workdir


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(configuration, workdir); bytes are put back."""
    return small_workdir.make(tmp_path_factory.mktemp("made"))


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


def test_a_named_data_set_cannot_have_modules_imported_either(made, tmp_path, monkeypatch):
    """Of a name that TFDS has no code for it reads the files in data_dir, as of a folder."""
    path = shutil.copytree(made[1] / "data" / "questions", tmp_path / "own" / "1.0.0")
    (tmp_path / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'hacked')!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    whole = (path / "features.json").read_text()
    name = next(n for n in re.findall(r'"(tensorflow_datasets[^"]*)"', whole) if "Text" in n)
    (path / "features.json").write_text(whole.replace(name, "evil.Text"))
    with pytest.raises(UserError, match="features.json"):
        load_examples("tfds:own:dev", data_dir=str(tmp_path))
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("name", ["../../vic", "/vic", "a/b", "..", ".hidden"])
def test_names_of_passages_lead_nowhere_else(made, tmp_path, name):
    """A training that went on with such a workdir built its index outside of it."""
    config, path = made[0], shutil.copytree(made[1], tmp_path / "w")
    (path / "data" / "digests.json").unlink()
    names = path / "data" / "names.txt"
    names.write_text(f"{name} {names.read_text()}")
    with pytest.raises(UserError, match=r"names\.txt: .* is no name of passages"):
        open_prepared(config, path)


def test_names_of_files_do_not_control_the_terminal(made, tmp_path, capsys):
    """Those of an index that was handed over set its title and colours."""
    path = shutil.copytree(made[1] / "indexes" / "passages", tmp_path / "w")
    (path / "versions" / "1" / "scann\x1b[31mX").touch()
    verify.main([str(path)])
    printed = "".join(capsys.readouterr())
    assert "\x1b" not in printed and "scann\\x1b[31mX" in printed


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


def test_an_index_of_a_year_is_no_checkpoint(made, tmp_path, capsys):
    """The quickstart's indexes, 2016 and 2018, were said to be damaged checkpoints."""
    path = shutil.copytree(made[1], tmp_path / "w")
    (path / "indexes" / "passages").rename(path / "indexes" / "2018")
    (path / "indexes" / "2018" / "words").mkdir()  # a kill while they were counted
    assert verify.main([str(path)]) == 0
    found = {file.name: file.stat().st_size for file in (path / "indexes" / "2018").rglob("*.*")
             if file.suffix in (".blob", ".offsets", ".f32", ".ids", ".i64")}
    out = capsys.readouterr().out
    assert f"indexes/2018: sound, index of 30 passages, {len(found)} files" in out, found


def test_what_else_is_damaged_in_an_index_that_cannot_be_opened_is_named(made, tmp_path, capsys):
    """What kept it from being opened was all that was told."""
    path = shutil.copytree(made[1] / "indexes" / "passages", tmp_path / "index")
    blob, embeddings = (next(path.rglob(name)) for name in ("text.blob", "embeddings.f32"))
    embeddings.write_bytes(embeddings.read_bytes()[:-1])
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    assert verify.main([str(path)]) == 1
    told = capsys.readouterr().err
    assert told.count("embeddings.f32 has ") == 1
    assert told.count(str(embeddings)) == told.count(str(blob)) == 1


def test_every_damaged_file_is_named(made, tmp_path, capsys):
    """Also where one is damaged before the other, and where an array of a checkpoint is, or the
    words that an index of embeddings is joined with."""
    path = shutil.copytree(made[1], tmp_path / "w")
    steps.stop(path / "rag_token", 4, "nll is NaN", 3)
    arrays = max((path / "rag_token" / "3" / "params").rglob("d/*"), key=lambda f: f.stat().st_size)
    damaged = ["config.json", "seconds.json", "rag_token/eval.json", "rag_token/stopped.json",
               "data/generator_tokenizer/tokenizer.json", "data/inputs.json",
               "data/questions/dataset_info.json", "data/memories/passages/text.blob",
               "data/memories/passages/text.offsets", "indexes/passages/embeddings.f32",
               "indexes/passages/passages/text.blob", arrays.relative_to(path).as_posix()]
    if not (path / damaged[9]).exists():  # a version of the index lies below it
        inside = next(path.glob("indexes/passages/**/embeddings.f32")).parent
        damaged[9:11] = [(inside / name).relative_to(path).as_posix()
                        for name in ("embeddings.f32", "passages/text.blob")]
    inside = (path / damaged[9]).parent
    build_bm25(PassageStore.open(inside / "passages"), path / "indexes/passages/words")
    words = path / "indexes/passages/words"
    damaged[:0] = [next(words.rglob(name)).relative_to(path).as_posix()
                   for name in ("indices.csc.index.npy", "text.blob")]
    for name in damaged:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 4
        (path / name).write_bytes(data)
    assert verify.main([str(path)]) == 1
    errors = capsys.readouterr().err
    for name in damaged[:-1]:
        assert str(path / name) in errors, name
    assert "step 3" in errors


def test_a_checkpoint_that_a_training_run_drops_meanwhile_is_not_damaged(
        made, tmp_path, monkeypatch, capsys):
    """It keeps the latest and the best alone, and the others go while somebody verifies."""
    path = shutil.copytree(made[1], tmp_path / "w") / "rag_token"
    with Checkpointer(path) as checkpointer:
        checkpointer.save(2, {"a": np.ones(3)}, {"m": np.ones(7)}, {})
    read = Checkpointer.verify

    def slow(self, step):
        shutil.rmtree(path / "2", ignore_errors=True)
        return read(self, step)

    monkeypatch.setattr(Checkpointer, "verify", slow)
    assert verify.main([str(path.parent)]) == 0
    printed = capsys.readouterr()
    assert "rag_token/3: sound" in printed.out and "rag_token/2" not in printed.out + printed.err


@pytest.mark.parametrize("error, told", [
    (KeyboardInterrupt(), None), (MemoryError(), "could not be read")])
def test_a_checkpoint_that_was_not_read_is_not_called_damaged(made, monkeypatch, capsys, error,
                                                              told):
    """After a Ctrl-C, or short of memory."""
    async def fail(**_):
        raise error

    monkeypatch.setattr("orbax.checkpoint._src.serialization.serialization._read_shard", fail)
    with pytest.raises(UserError if told else KeyboardInterrupt, match=told):
        verify.main([str(made[1])])
    assert "DAMAGED" not in capsys.readouterr().out


def test_what_is_neither_index_nor_store_nor_workdir_is_an_error(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"architectures": ["BartModel"]}')
    for path, told in ((tmp_path, "neither an index nor"), (checkpoint, "neither an index nor"),
                       (pathlib.Path(__file__), "neither an index nor"),
                       (tmp_path / "nothing", "there is no such folder")):
        with pytest.raises(UserError, match=told):
            verify.main([str(path)])
