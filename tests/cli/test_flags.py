"""Command lines: overrides in both forms, help that is complete and quick, clear refusals."""

import argparse
import dataclasses
import importlib
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rag_jax import config as configs
from rag_jax import process
from rag_jax.cli import flags, reproduce, train
from rag_jax.config import Config, ConfigError, config_files, overrides
from rag_jax.errors import Preempted
from rag_jax.training import workdir

ROOT = pathlib.Path(__file__).parents[2]
ENTRY_POINTS = ("train", "evaluate", "generate", "build_index")


def parse(*argv, load=None):
    parser = flags.make_parser("train", "Trains.")
    parser.add_argument("--workdir", default="w")
    return flags.parse_with_config(parser, list(argv), load)


def test_without_flags_it_is_the_quickstart():
    options, config = parse()
    assert config == config_files.load_file(str(ROOT / "configs" / "quickstart.py"))
    assert options.workdir == "w"


def test_both_forms_of_an_override_and_options_between_them():
    options, config = parse("--config.train.steps=7", "--workdir", "x", "--config.seed", "3",
                            "--config.mesh.data", "-1")
    assert (config.train.steps, config.seed, config.mesh.data, options.workdir) == (7, 3, -1, "x")


def test_data_dir_is_a_short_form():
    assert parse("--data_dir=d")[1].data.data_dir == "d"
    assert parse("--data_dir", "d", "--config.data.data_dir=d")[1].data.data_dir == "d"
    with pytest.raises(configs.ConfigError, match="--data_dir=d and --config.data.data_dir=e: giv"):
        parse("--data_dir=d", "--config.data.data_dir=e")


def test_a_value_may_hold_an_equals_sign():
    _, config = parse("--config.data.data_dir=a=b")
    assert config.data.data_dir == "a=b"


def test_a_later_override_wins_and_a_preset_keeps_what_follows():
    _, config = parse("--config.seed=1", "--config.seed=2", "--config.model.generator=tiny",
                      "--config.model.generator.width=64")
    assert config.seed == 2 and config.model.generator.width == 64
    assert config.model.generator.encoder_layers == configs.BART_PRESETS["tiny"].encoder_layers


def test_a_preset_and_a_family_count_before_fields_of_theirs_that_stand_before_them():
    """--config.eval.num_beams=2 was dropped without a word where --config.eval=NAME followed."""
    config = parse("--config.eval.num_beams=2", "--config.eval=paper-generation",
                   "--config.model.generator.gated=false", "--config.model.generator.family=t5")[1]
    assert config.eval == dataclasses.replace(configs.EVAL_PRESETS["paper-generation"], num_beams=2)
    assert isinstance(config.model.generator, configs.T5Config) and not config.model.generator.gated


def test_overrides_change_the_named_config_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from rag_jax.config import Config\n"
                    "def get_config(seed='5'): return Config(seed=int(seed))\n")
    assert parse(f"--config={file}")[1].seed == 5
    assert parse("--config", f"{file}:6", "--config.train.steps=1")[1] == overrides.replace(
        configs.Config(seed=6), {"train.steps": 1})


@pytest.mark.parametrize("argv, told", [
    (["--config.seed"], "--config.seed: a value is missing"),
    (["--config.data.data_dir", "--workdir=x"], "--config.data.data_dir: a value is missing"),
    (["--config.sead=1"], "config.sead: no such field; did you mean seed"),
    (["--config.seed=x"], "config.seed='x': expected int"),
    (["--config.seed=-1"], "config.seed=-1: must be at least 0"),
    (["--config=nowhere.py"], "--config=nowhere.py: no such file"),
    (["--help", "--config.sead=1"], "config.sead: no such field"),
])
def test_what_cannot_be_used_is_a_config_error(argv, told):
    with pytest.raises(configs.ConfigError) as error:
        parse(*argv)
    assert told in str(error.value)


@pytest.mark.parametrize("argv, told", [
    (["runs=closed_book", "retrieval.k=7"],
     "config.retrieval.k=7: run 'closed_book' sets config.retrieval.k=0; leave the field out"),
    (["runs=frozen,fid", "train.query_encoder_rate=0.5"], "run 'frozen' sets config.train.query_en"
     "coder_rate=none"),
    (["runs=rag_sequence", "model.kind=token"], "the run decides it"),
    (["model.kind=sequence"], "the run decides it; set config.runs"),
    (["runs=rag_token,closed_book", "retrieval.k=7"], None),
    (["runs=closed_book", "retrieval.k=0"], None),
    (["runs=frozen", "train.query_encoder_rate=none"], None),
])
def test_a_field_that_no_run_of_the_command_would_have_is_refused(argv, told):
    """The run's name overrode it without a word."""
    argv = [f"--config.{change}" for change in argv]
    if told is None:
        parse(*argv)
        return
    with pytest.raises(configs.ConfigError) as error:
        parse(*argv)
    assert told in str(error.value)


def test_a_config_file_that_contradicts_its_own_run_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from rag_jax.config import *\ndef get_config(run): return Config(\n"
                    "    runs=(run,), train=TrainConfig(query_encoder_rate=0.2))\n")
    with pytest.raises(configs.ConfigError, match="query_encoder_rate=0.2: run 'frozen' sets"):
        parse(f"--config={file}:frozen")
    parse(f"--config={file}:rag_token")
    parse(f"--config={file}:rag_token", "--config.runs=frozen")  # the file's value is for its own


def test_an_unknown_option_is_refused(capsys):
    """argparse, left to itself with parse_known_args, would ignore it."""
    with pytest.raises(SystemExit) as stop:
        parse("--stepps=3")
    assert stop.value.code == 2
    assert "--stepps=3" in capsys.readouterr().err


@pytest.mark.parametrize("argv, advice", [
    ("--workdirr=x", "did you mean --workdir?"),
    ("--work=x", "did you mean --workdir?"),  # no abbreviation: a later option could take it
    ("--train.steps=3", "did you mean --config.train.steps?"),
    ("--staleness=3", "did you mean --config.retrieval.staleness?"),
    ("--zzzzzz", "known: --help, --workdir"),
])
def test_a_misspelt_option_gets_near_matches(argv, advice, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(argv, "question")
    assert stop.value.code == 2 and advice in capsys.readouterr().err


def test_a_command_without_a_configuration_advises_none_of_its_fields(capsys):
    """`reproduce --seed` was told of --config.seed, which it then refused."""
    parser = flags.make_parser("reproduce", "")
    parser.add_argument("--seeds", type=int)
    with pytest.raises(SystemExit):
        parser.parse_args(["--seed=1"])
    assert "did you mean --seeds?" in capsys.readouterr().err


@pytest.mark.parametrize("fields, wrong", [
    ("train={'steps': 3}", "config.train: a dict; expected TrainConfig"),
    ("model=None", "config.model: a NoneType; expected ModelConfig"),
    ("train=TrainConfig(optimizer='adam')", "config.train.optimizer: a str; expected"),
])
@pytest.mark.parametrize("argv", [(), ("--help",), ("--config.train.optimizer.learning_rate=3",)])
def test_a_section_of_a_file_that_is_none_is_named_at_once(fields, wrong, argv, tmp_path):
    """Its help, and the change of a field in it, ended in a traceback."""
    (tmp_path / "own.py").write_text("from rag_jax.config import Config, TrainConfig\n"
                                     f"def get_config(): return Config({fields})\n")
    with pytest.raises(ConfigError, match=wrong):
        parse(f"--config={tmp_path / 'own.py'}", *argv)


@pytest.mark.parametrize("argv, question", [
    (["--", "--who is it?"], ["--who is it?"]), (["Who", "--", "is it?"], ["Who", "is it?"]),
    (["--workdir=x", "--", "--", "-h"], ["--", "-h"]),
    (["--", "--config.seed=1", "--help", "--workdir"], ["--config.seed=1", "--help", "--workdir"]),
])
def test_what_stands_after_two_dashes_is_no_option(argv, question):
    """A question that begins with a dash could not be asked."""
    parser = flags.make_parser("generate", "")
    parser.add_argument("question", nargs="*")
    parser.add_argument("--workdir")
    options, config = flags.parse_with_config(parser, argv)
    assert options.question == question and config.seed == 0


def test_a_home_is_where_a_shell_would_have_it(monkeypatch):
    """A folder "~" was made, as shells leave it where it stands after an equals sign."""
    monkeypatch.setenv("HOME", "/home/ada")
    parser = flags.make_parser("generate", "")
    parser.add_argument("question", nargs="*")
    parser.add_argument("--workdir")
    options, config = flags.parse_with_config(parser, [
        "--workdir=~/runs", "x=~/y", "--config.data.data_dir=~", "--", "--who=~/me"])
    assert (options.workdir, config.data.data_dir) == ("/home/ada/runs", "/home/ada")
    assert options.question == ["x=~/y", "--who=~/me"]
    named = parser.parse_intermixed_args(["--workdir=~root/a~/b"])
    assert named.workdir == "~root/a~/b", "other users' homes are left as they are"


def test_an_option_does_not_take_a_word_after_two_dashes(capsys):
    """The folder was one with a NUL byte in its name."""
    parser = flags.make_parser("generate", "")
    parser.add_argument("question", nargs="*")
    parser.add_argument("--workdir")
    with pytest.raises(SystemExit):
        flags.parse_with_config(parser, ["--workdir", "--", "who"])
    assert "argument --workdir: expected one argument" in capsys.readouterr().err


def test_where_nothing_is_asked_words_after_two_dashes_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse("--", "--workdir=x")
    assert "unrecognized arguments: --workdir=x" in capsys.readouterr().err


def test_load_gives_the_configuration_that_flags_change():
    def load(options):
        assert options.workdir == "there"
        return configs.Config(seed=9)

    _, config = parse("--workdir=there", "--config.train.steps=2", load=load)
    assert config == overrides.replace(configs.Config(seed=9), {"train.steps": 2})


def test_help_shows_the_defaults_of_the_config_and_the_overrides(capsys):
    with pytest.raises(SystemExit):
        parse("--help", "--config.seed=41")
    text = capsys.readouterr().out
    assert "--config.seed=41  (int)" in text
    assert "--config.runs=rag_token,rag_sequence,frozen,closed_book  (str,...)" in text
    assert "--config.retrieval.num_leaves=none  (int|none)" in text
    assert "--config.tensorboard=true  (bool)" in text
    assert "bart-large" in text and "as this config sets them" in text
    with pytest.raises(SystemExit):
        parse("--help", load=configs.Config)
    assert "as the quickstart sets them; a workdir has its own" in capsys.readouterr().out


@pytest.mark.parametrize("given, meant", [("10:5", (10, 5)), ("0:1", (0, 1)), ("5", None),
                                          ("3:0", None), ("-1:2", None), ("a:b", None)])
def test_steps_to_profile(monkeypatch, capsys, tmp_path, given, meant):
    """A mistake would show after hours of training, as a trace that is missing."""
    profiles = []
    monkeypatch.setattr("rag_jax.training.run.train",
                        lambda config, path, profile: profiles.append(profile))
    argv = [f"--workdir={tmp_path}", f"--profile={given}"]
    if meant:
        assert not train.main(argv) and profiles == [meant]
        return
    with pytest.raises(SystemExit):
        train.main(argv)
    assert f"{given}: must be START:STEPS" in capsys.readouterr().err and not profiles


@pytest.mark.parametrize("module, called, argv", [
    (train, "rag_jax.training.run.train", []),
    (reproduce, "rag_jax.reproduction.run.reproduce", ["table1", "--reduced"])])
def test_what_a_signal_stops_ends_with_status_75(monkeypatch, capsys, tmp_path, module, called,
                                                 argv):
    """With status 0 a job scheduler would take it for finished."""
    def stopped(*_, **__):
        raise Preempted("generator: stopped at step 3")

    monkeypatch.setattr(called, stopped)
    monkeypatch.setattr(process, "_ignore_signals", lambda: None)  # of these tests
    with pytest.raises(SystemExit) as ended:
        process.run(lambda: module.main([*argv, f"--workdir={tmp_path}"]))
    assert ended.value.code == 75
    assert "stopped at step 3; the same command goes on" in capsys.readouterr().out
    monkeypatch.setattr(called, lambda *_, **__: None)
    assert not module.main([*argv, f"--workdir={tmp_path}"])


CHECK = """
import contextlib, importlib, io, sys
heavy = {"jax", "flax", "torch", "tensorflow", "transformers", "tensorflow_datasets", "orbax"}
text = io.StringIO()
for name in sys.argv[1:]:
    main = importlib.import_module(f"rag_jax.cli.{name}").main
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            main(["--help"])
    except SystemExit as stop:
        assert not stop.code, stop
    from rag_jax.config import config_files, overrides
    missing = [f for f in overrides.fields() if f"--config.{f}=" not in text.getvalue()]
    assert not missing, (name, missing)
    assert f"rag_jax.{name}" in text.getvalue()
    assert not heavy & set(sys.modules), (name, heavy & set(sys.modules))
print("complete and light")
"""


def test_help_lists_every_field_without_importing_anything_heavy():
    """Importing jax for --help would take seconds; a field that is not listed cannot be found."""
    done = subprocess.run([sys.executable, "-c", CHECK, *ENTRY_POINTS], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          timeout=60)
    assert done.stdout.strip() == "complete and light", done.stderr


def test_a_wrong_flag_ends_the_process_with_one_line_and_status_1():
    done = subprocess.run([sys.executable, "-m", "rag_jax.train", "--config.train.step=3"],
                          cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: config.train.step: no such field; did you mean steps")
    assert done.stderr.count("\n") == 1


def test_a_workdir_in_a_bucket_is_refused(capsys):
    """pathlib would silently write into a local folder named gs: instead."""
    from rag_jax.cli import generate, train

    for main in (train.main, generate.main):
        with pytest.raises(SystemExit):
            main(["--workdir=gs://bucket/run"])
        assert "gs://bucket/run: must be a folder of this machine" in capsys.readouterr().err


@pytest.mark.parametrize("command, argv", [
    ("build_index", ["--passages=p.tsv", "--out=there", "--workdir={}"]),
    ("build_index", ["--passages=p.tsv", "--out={}"]),
    ("evaluate", ["--out={}"]), ("convert", ["--from=there", "--to={}"]),
    ("ingest", ["--workdir=there", "--", "{}"])])
def test_no_command_takes_another_folder_than_the_one_that_is_meant(command, argv, capsys):
    """The index was built for runs/quickstart, and figures were written into gs:/bucket/run."""
    main = importlib.import_module(f"rag_jax.cli.{command}").main
    for given, told in (("", "empty: expected the name of a folder"),
                        ("gs://bucket/run", "gs://bucket/run: must be a folder of this machine")):
        with pytest.raises(SystemExit):
            main([argument.format(given) for argument in argv])
        assert told in capsys.readouterr().err


def test_a_workdir_without_config_is_named(tmp_path):
    parser = flags.make_parser("evaluate", "Evaluates.")
    flags.add_workdir(parser)
    with pytest.raises(configs.ConfigError, match="no config.json") as error:
        flags.parse_with_config(parser, [f"--workdir={tmp_path}"], flags.workdir_config)
    assert str(tmp_path) in str(error.value)


def test_a_reranker_is_no_tower_that_could_answer_without_a_workdir(monkeypatch):
    """`generate` did not open the workdir of its --help, and asked for encoders."""
    monkeypatch.setattr(flags, "workdir_config", lambda options: Config(seed=7))
    for reranks, seed in ((("reranker",), 7), (("reranker", "generator"), 0)):
        options = SimpleNamespace(workdir=None, run=None, changed_fields=tuple(
            f"model.{name}.pretrained" for name in reranks))
        assert flags.asked_config(options).seed == seed


def test_run_picks_one_of_the_workdirs_runs(tmp_path):
    both = configs.Config(runs=("frozen", "rag_sequence"))
    (tmp_path / "config.json").write_text(config_files.to_json(both))

    def parsed(*argv):
        parser = flags.make_parser("evaluate", "Evaluates.")
        flags.add_workdir(parser)
        return flags.parse_with_config(parser, [f"--workdir={tmp_path}", *argv],
                                       flags.workdir_config)[1]

    assert parsed().train.query_encoder_rate is None
    assert parsed("--run=rag_sequence").kind == "sequence"
    (tmp_path / "rag_sequence").mkdir()
    workdir.begin_run(tmp_path, "rag_sequence", both.eval)  # the first one that began
    assert parsed().kind == "sequence"
    with pytest.raises(configs.ConfigError, match="--config.runs=frozen: --run names the one of"):
        parsed("--config.runs=frozen")
    with pytest.raises(configs.ConfigError, match="config.train.query_encoder_rate=1.0: run 'froz"):
        parsed("--run=frozen", "--config.train.query_encoder_rate=1")
    with pytest.raises(configs.ConfigError, match="'rag_token' is no run: .*frozen, rag_sequence"):
        parsed("--run=rag_token")


@pytest.mark.parametrize("content, told", [
    ("from rag_jax.config import Config\ndef get_config(:\n    pass\n",
     "mine.py:2: invalid syntax: def get_config(:"),
    ("from rag_jax.config import Config\n\nimport nowhere\n",
     "mine.py:3: import nowhere: ModuleNotFoundError: No module named 'nowhere'"),
    ("from rag_jax.config import Config\ndef get_config():\n    return Config(sead=1)\n",
     "mine.py:3: return Config(sead=1): TypeError: Config.__init__() got an unexpected"),
    ("import beside\ndef get_config():\n    return beside.get()\n",
     "beside.py:2: return 1 / 0: ZeroDivisionError"),
    ("x = 1\0\n", "mine.py: source code string cannot contain null bytes"),
    ("import sys\nsys.exit(0)\n", "mine.py:2: sys.exit(0): SystemExit: 0"),
    ("get_config = 3\n", "the file defines no get_config()"),
])
def test_what_a_config_file_raises_names_its_line(content, told, tmp_path):
    """A typing mistake in a config file ended in a traceback through importlib."""
    (tmp_path / "mine.py").write_text(content)
    (tmp_path / "beside.py").write_text("def get():\n    return 1 / 0\n")
    with pytest.raises(configs.ConfigError, match="--config=") as error:
        parse(f"--config={tmp_path / 'mine.py'}")
    assert told in str(error.value)


def test_a_config_file_imports_what_lies_beside_it_and_nothing_else(tmp_path):
    """The second file was given the first one's helper, then its packages, and get_config() none at
    all; what is installed stays imported."""
    import colorsys  # noqa: F401

    for number, name in enumerate(("one", "two")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "helper.py").write_text(f"SEED = {number}\n")
        (folder / "mine.py").write_text(
            "import helper\nfrom rag_jax.config import Config, TrainConfig\n\n\n"
            "def get_config():\n    import later\n"
            "    return Config(seed=helper.SEED, train=TrainConfig(steps=later.STEPS))\n\n\n"
            "def describe(argument):\n    import later\n    return str(later.STEPS)\n")
        for package in ("package/inner", "without_init"):
            (folder / package).mkdir(parents=True)
            (folder / package / "steps.py").write_text(f"STEPS = {number}\n")
        (folder / "package" / "__init__.py").write_text("")
        (folder / "later.py").write_text(
            "import package.inner.steps, without_init.steps, colorsys\n"
            "assert package.inner.steps.STEPS == without_init.steps.STEPS\n"
            "STEPS = package.inner.steps.STEPS\n")
        before = list(sys.path), set(sys.modules)
        config = config_files.load_file(str(folder / "mine.py"))
        assert (config.seed, config.train.steps) == (number, number)
        assert config_files.about(str(folder / "mine.py")) == str(number)
        assert (sys.path, set(sys.modules)) == before


def test_a_workdir_that_is_a_file_is_named(tmp_path):
    """It was "[Errno 20] Not a directory", or a workdir without config.json."""
    from rag_jax.training import workdir

    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for name, told in (("file", "file is a file, not a folder"), ("link", "link is a link to .*disk"
                                                                  ", which is not there")):
        for path in (tmp_path / name, tmp_path / name / "below"):
            with pytest.raises(configs.ConfigError, match=told):
                workdir.read(path)
            with pytest.raises(configs.ConfigError, match=told):
                workdir.start(configs.Config(), path)


def test_counts_are_whole_numbers_in_order():
    """A k of 0 would mean the configured one, and a k twice would be measured twice."""
    assert flags.counts("10, 5,5") == (5, 10)
    for text in ("5,", "0", "-1", "a", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be whole numbers from 1"):
            flags.counts(text)
