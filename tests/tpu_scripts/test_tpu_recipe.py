"""natural_questions.sh: commands that rag_jax takes, in an order that can be taken up again."""

import importlib

import pytest

from rag_jax.cli import flags
from rag_jax.config import config_files, overrides
from rag_jax.training import workdir as workdirs
from tests.tpu_scripts.cloud import SCRIPTS, Cloud

STEPS = ["mkdir", "flock", *["rag_jax.train", "rag_jax.evaluate"] * 2]


class Parsed(Exception):
    """The options and configuration of a command, before it does anything."""


@pytest.fixture
def parse(monkeypatch):
    """A command line of rag_jax -> its options and configuration."""
    original = flags.parse_with_config

    def stop(*arguments):
        raise Parsed(*original(*arguments))

    def parse(words):
        with pytest.raises(Parsed) as raised:
            name = words[0].removeprefix("rag_jax.")
            importlib.import_module(f"rag_jax.cli.{name}").main(words[1:])
        return raised.value.args

    monkeypatch.setattr(flags, "parse_with_config", stop)
    monkeypatch.chdir(SCRIPTS.parent)
    return parse


def run(cloud: Cloud, *arguments: str, train: str = "true", fails: str = "never"):
    """Runs the recipe with programs that note their arguments; `train` is what training does."""
    noted = cloud.root / "noted"
    noted.unlink(missing_ok=True)
    for name in ("mkdir", "flock", "python"):
        cloud.program(name, f"""echo "{name} $*" >> "{noted}"
case "{name} $*" in *{fails}*) exit 9 ;; *rag_jax.train*) {train} ;; esac""")
    done = cloud.run("natural_questions.sh", *arguments, tpu=False)
    lines = noted.read_text().splitlines() if noted.exists() else []
    return done, [line.removeprefix("python -m ").split() for line in lines]


def test_every_command_is_one_that_rag_jax_takes(cloud, parse, tmp_path):
    work = tmp_path / "nq"
    work.mkdir()
    done, commands = run(cloud, str(work), "--config.train.steps=7")
    assert done.returncode == 0, done.stderr
    assert [words[0] for words in commands] == STEPS
    fetched = commands[1][5:]
    assert f"--directory-prefix={tmp_path}/dpr" in commands[1]
    for number, (kind, k) in enumerate((("rag_token", 15), ("rag_sequence", 50))):
        options, config = parse(commands[2 + 2 * number])
        assert options.workdir == str(work)
        assert config.runs == (kind,) and config.train.steps == 7
        assert set(config.model.sources) == {"query_encoder", "document_encoder", "generator"}
        passages = config.data.passages
        assert passages.startswith(f"{tmp_path}/dpr/")
        assert any(url.endswith(passages.rpartition("/")[2]) for url in fetched)
        assert config.data.data_dir == f"{tmp_path}/tasks"
        workdirs.start(config, work)
        options, asked = parse(commands[3 + 2 * number])
        assert (options.run, options.split, asked.eval.k) == (kind, "test", k)
        assert (asked.eval.strategy, asked.eval.num_beams) == ("thorough", 1)
        assert asked.eval == config.eval, "the best checkpoint is chosen by other answers"


def test_a_step_that_fails_ends_it(cloud, tmp_path):
    for number, name in enumerate(STEPS[1:4], 2):
        done, commands = run(cloud, str(tmp_path), fails=name)
        assert done.returncode == 9 and [words[0] for words in commands] == STEPS[:number]


def test_interrupted_training_is_not_evaluated(cloud, tmp_path):
    """rag_jax.train ends with status 75 when a signal has stopped it, on whichever host."""
    done, commands = run(cloud, str(tmp_path), train="exit 75")
    assert done.returncode == 75
    assert [words[0] for words in commands] == STEPS[:3]


def test_dry_run_prints_every_command(cloud, tmp_path):
    done, commands = run(cloud, "--dry-run", str(tmp_path / "nq"))
    assert done.returncode == 0 and not commands and not list(tmp_path.glob("*/nq"))
    printed = [line.removeprefix("python -m ").split()[0] for line in done.stdout.splitlines()]
    assert printed == STEPS


def test_options_come_before_the_workdir(cloud, tmp_path):
    """--dry-run behind it went to rag_jax.train, after hours of downloads."""
    done, commands = run(cloud, str(tmp_path / "nq"), "--dry-run")
    assert done.returncode == 1 and not commands
    assert "--dry-run: after WORKDIR come --config.FIELD=VALUE alone" in done.stderr


def test_the_recipe_is_that_of_the_papers_table(parse, cloud, tmp_path):
    """Another staleness, pairs or checkpoint would give another number than table 1's files."""
    _, commands = run(cloud, str(tmp_path / "nq"))
    for words in commands[2::2]:
        _, config = parse(words)
        file, = [word for word in words if word.startswith("--config=")]
        _, recipe = parse(["rag_jax.train", file])
        changed = {name for name in overrides.fields()
                   if overrides.value(config, name) != overrides.value(recipe, name)}
        assert changed == {"data.passages", "data.data_dir", "mesh.fsdp", "eval.batch_size"}
        scale = config_files.load_file(str(SCRIPTS.parent / "configs" / "paper_scale.py"))
        assert (scale.train, scale.retrieval, scale.data) == (
            recipe.train, recipe.retrieval, recipe.data)


def test_the_config_is_complete(parse, cloud):
    """The models are the paper's, and what the recipe adds to the config file are the data."""
    done, _ = run(cloud, "--dry-run", "runs/nq")
    line = next(line for line in done.stdout.splitlines() if "rag_jax.train" in line)
    _, config = parse(line.replace("\\", "").removeprefix("python -m ").split())
    assert (config.model.retriever.layers, config.model.retriever.dropout) == (12, 0.1)
    assert (config.model.generator.encoder_layers, config.model.generator.dropout) == (12, 0.1)
    assert config.data.chunk_words == 0  # the file's ids are those of the paper's passages
    assert config.train.batch_size == 64
