"""No flipped byte of prepared data, or of a workdir's JSON files, is silent."""

import json

import pytest

from rag_jax.data.prepare import prepare
from rag_jax.errors import UserError
from rag_jax.training import workdir
from rag_jax.training.clock import Clock
from tests.campaigns import campaign
from tests.campaigns.flips import files_of, flip
from tests.training import small_workdir


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(configuration, workdir); bytes are put back."""
    return small_workdir.make(tmp_path_factory.mktemp("made"))


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
                list(prepare(config, path).stores.values())  # a store is opened when used
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
