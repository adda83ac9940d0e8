"""Command lines: `--config=FILE --config.a.b=VALUE` on top of plain argparse options.

Flags are read before jax is imported, so that `--help` and mistakes answer at once. tyro 1.0.17
does not do this job: no presets of a section, no commas in tuples, no `=false` or `=none`, no
advice where `--config.` is left out, and 0.3 s more before the first line.
"""

import argparse
import contextlib
import math
import os
import pathlib
import sys
import textwrap
from collections.abc import Callable, Sequence

from rag_jax import hosts
from rag_jax.config import PRESETS, Config, ConfigError, config_files, overrides, rules
from rag_jax.config.config_files import QUICKSTART
from rag_jax.errors import near_matches

DEFAULT_WORKDIR = "runs/quickstart"
# Options in which the processes of one job may differ; --config is compared field by field.
OWN = ("coordinator", "process_id", "heartbeat", "config", "changed_fields", "settings")
NO_OPTION = "\0"  # marks words after `--`; no argument of a process can contain it


class _Parser(argparse.ArgumentParser):
    """Options anywhere between the other arguments, written in full; misspelt ones get advice."""

    takes_fields = False  # of a configuration, as --config.FIELD

    def parse_known_args(self, args=None, namespace=None):
        return self._without_unknown(*super().parse_known_args(args, namespace))

    def parse_known_intermixed_args(self, args=None, namespace=None):
        options, words = _divided(args)
        places = [action.dest for action in self._get_positional_actions()]
        if words and not places:
            self.error(f"unrecognized arguments: {' '.join(words)}")
        last = self._option_string_actions.get(options[-1]) if options else None
        if last is not None and last.nargs is None:
            self.error(f"argument {options[-1]}: expected one argument")
        # Between its two passes argparse forgets what stood after `--`: the mark keeps these words
        # from being taken for options.
        marked = [*options, *(NO_OPTION + word for word in words)]
        # Python 3.13's method does not call `parse_known_args` above.
        parsed, rest = self._without_unknown(
            *super().parse_known_intermixed_args(marked, namespace))
        for place in places:
            given = getattr(parsed, place)
            if given is not None:
                setattr(parsed, place, [word.removeprefix(NO_OPTION) for word in given]
                        if isinstance(given, list) else given.removeprefix(NO_OPTION))
        return parsed, [word.removeprefix(NO_OPTION) for word in rest]

    def _without_unknown(self, options: argparse.Namespace, rest: list[str]
                         ) -> tuple[argparse.Namespace, list[str]]:
        for argument in rest:
            if argument.startswith("--"):
                self.error(f"unrecognized arguments: {argument}; {self._near(argument)}")
        return options, rest

    def _near(self, argument: str) -> str:
        """Near matches of an unknown option: options, or a field that lacks --config."""
        name = argument.partition("=")[0].removeprefix("--")
        if self.takes_fields and (advice := overrides.near_elsewhere(name, "--config")):
            return advice
        known = [option for option in self._option_string_actions if option.startswith("--")]
        return near_matches(f"--{name}", known, cutoff=0.75)


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser for `python -m rag_jax.NAME`; its `parse_intermixed_args` takes any order."""
    return _Parser(
        prog=f"python -m rag_jax.{name}", description=description, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)


def _divided(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The arguments before `--`, and the words after it; None = the arguments of the process."""
    argv = list(sys.argv[1:] if argv is None else argv)
    end = argv.index("--") if "--" in argv else len(argv)
    return [*map(_from_home, argv[:end])], argv[end + 1:]


def _from_home(argument: str) -> str:
    """--NAME=~/PATH with the user's home for "~", which shells do not put there."""
    option, equals, value = argument.partition("=")
    at_home = option.startswith("--") and (value == "~" or value.startswith("~/"))
    return f"{option}={os.path.expanduser(value)}" if at_home else argument


def bare(option: str, value: str, argv: Sequence[str] | None = None) -> list[str]:
    """`argv` with OPTION=VALUE for each OPTION without a value, so that the next word is not taken
    for its value."""
    options, words = _divided(argv)
    return [*(f"{option}={value}" if a == option else a for a in options), "--", *words]


def _field_help(config: Config, whose: str) -> str:
    lines = [f"configuration fields (--config.NAME=VALUE), as {whose}:"]
    for name, field in overrides.fields(config).items():
        given = overrides.shown(overrides.value(config, name))
        lines += [f"  --config.{name}={given}  ({overrides.type_name(field.type)})",
                  f"      {field.metadata['doc']}"]
    for section in ("model.retriever", "model.generator", "eval"):
        chosen = overrides.value(config, section)
        presets = next(named for cls, named in PRESETS.items() if isinstance(chosen, cls))
        lines.append(f"presets of --config.{section}: {', '.join(presets)}")
    return "\n".join(lines)


def _changes(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Splits `--config.NAME=VALUE` and `--config.NAME VALUE` from the other arguments."""
    changes, rest, arguments = {}, [], iter(argv)
    for argument in arguments:
        if not argument.startswith("--config."):
            rest.append(argument)
            continue
        name, equals, value = argument.removeprefix("--config.").partition("=")
        if not equals:
            value = next(arguments, "--")
            if value.startswith("--"):
                raise ConfigError(f"--config.{name}: a value is missing")
        changes[name] = value
    return changes, rest


def parse_with_config(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None,
                      load: Callable[[argparse.Namespace], Config] | None = None,
                      several: bool = True,
                      with_runs: Callable[[Config, bool], Config] | None = None
                      ) -> tuple[argparse.Namespace, Config]:
    """Options and the validated configuration.

    Args:
      parser: with the options of the entry point.
      argv: arguments; None = those of the process.
      load: options -> the configuration that the flags `--config.NAME` change; None adds an option
        --config FILE, by default the quickstart's.
      several: the command also runs as several processes.
      with_runs: gives a configuration its runs, where its other fields decide which there are; it
        is told whether a flag names them.

    Returns:
      The options, with `changed_fields`, the names of the flags `--config.NAME`, and `settings`,
      the values of the fields that differ from the configuration before; and the configuration.

    Raises:
      ConfigError: a config file or field that cannot be used.
    """
    parser.takes_fields = True
    if load is None:
        parser.add_argument("--config", default=str(QUICKSTART), metavar="FILE",
                            help="python file with get_config(), your own or a shipped one "
                            f"(default: configs/{QUICKSTART.name}); FILE:NAME where it takes a "
                            "name; with --help it says what it costs")
    parser.add_argument("--data_dir", metavar="DIR", help="short for --config.data.data_dir=DIR")
    if several:
        _add_hosts(parser)
    given, words = _divided(argv)
    changes, rest = _changes(given)
    asked = [argument for argument in rest if argument not in ("-h", "--help")]
    if asked != rest:
        # A command without --config may have required options, which are missing.
        file = None if load else parser.parse_known_args(asked)[0].config
        parser.epilog = _epilog(file, changes)
    options = parser.parse_intermixed_args([*rest, "--", *words])
    data_dir = changes.get("data.data_dir", options.data_dir)
    if options.data_dir not in (None, data_dir):
        raise ConfigError(f"--data_dir={options.data_dir} and --config.data.data_dir={data_dir}: "
                          "give one of them")
    if options.data_dir is not None:
        changes["data.data_dir"] = data_dir
    options.changed_fields = tuple(changes)
    base = load(options) if load else config_files.load_file(options.config)
    if load and "runs" in changes and not with_runs:
        raise ConfigError(f"--config.runs={changes['runs']}: --run names the one of the workdir's "
                          "runs to open")
    config = overrides.replace(base, changes)
    config = rules.validate(with_runs(config, "runs" in changes) if with_runs else config)
    options.settings = {name: overrides.value(config, name)
                        for name in overrides.differences(base, config)}
    # The fields that a file sets are meant for the runs that it names.
    own = [] if load or "runs" in changes else overrides.not_default(config)
    rules.check_set_by_runs(config, [*changes, *own])
    return options, config


def _epilog(file: str | None, changes: dict[str, str]) -> str:
    """The end of --help: the description of a config file, the fields as it sets them, and the
    shipped files; without a file, only the fields, as the quickstart sets them."""
    config = overrides.replace(config_files.load_file(file or str(QUICKSTART)), changes)
    if file is None:
        return _field_help(config, "the quickstart sets them; a workdir has its own")
    about = "" if file == str(QUICKSTART) else f"{file}:\n{config_files.about(file)}\n\n"
    files = f"shipped config files (--config=NAME): {', '.join(config_files.shipped())}"
    wrapped = textwrap.fill(files, 98, subsequent_indent="  ", break_on_hyphens=False)
    fields = _field_help(config, "this config sets them")
    return f"{about}{fields}\n{wrapped}"


def local_folder(name: str) -> str:
    """The type of a flag that names a folder; pathlib would take gs://b/x for the folder gs:/b/x.

    Raises:
      argparse.ArgumentTypeError: it is a URL, or empty, as an unset variable of a shell.
    """
    plain = name.removeprefix(NO_OPTION)
    if not plain:
        raise argparse.ArgumentTypeError("empty: expected the name of a folder")
    if "://" in plain:
        raise argparse.ArgumentTypeError(
            f"{plain}: must be a folder of this machine; mount a disk or a network share for it")
    return name


def counts(text: str) -> tuple[int, ...]:
    """The type of a flag that lists whole numbers, such as 5,10,15; in order, each once.

    Raises:
      argparse.ArgumentTypeError: it is another text.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text}: must be whole numbers from 1, such as 5,10,15")
    return tuple(sorted(set(map(int, words))))


def seconds(text: str) -> float:
    """The type of a flag that is a time.

    Raises:
      argparse.ArgumentTypeError: it is another text.
    """
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: must be seconds, above 0")


def numbers(text: str) -> tuple[float, ...]:
    """The type of a flag that lists numbers, such as 0,0.3,1."""
    return tuple(map(float, text.split(",")))


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a job of several processes; Slurm and TPU slices need none of them."""
    group = parser.add_argument_group("several hosts, each with its own process")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--num_processes", type=int, metavar="N", help="how many there are; "
                       "1, without the others: alone, whatever Slurm or the TPU says")
    group.add_argument("--process_id", type=int, metavar="I", help="which this is, from 0")
    group.add_argument("--heartbeat", type=int, metavar="SECONDS", default=hosts.HEARTBEAT_SECS,
                       help="silence after which a process is taken for dead and the others end "
                       "(default: %(default)s)")


def connect(options: argparse.Namespace, config: Config) -> None:
    """Joins the other processes, if there are any; before anything else asks for a device.

    Raises:
      ConfigError: they cannot be joined, or were started with another command.
    """
    hosts.connect(options.coordinator, options.num_processes, options.process_id,
                  options.heartbeat)
    hosts.check_same(overrides.texts(config) | {
        f"--{name}": str(given) for name, given in vars(options).items() if name not in OWN})


def add_workdir(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name a trained model: --workdir, --run, --step, --index."""
    parser.add_argument("--workdir", type=local_folder,
                        help=f"workdir of rag_jax.train (default: {DEFAULT_WORKDIR})")
    parser.add_argument("--run", help="which of the workdir's runs (default: the first "
                        "that began)")
    parser.add_argument("--step", type=int, help="checkpoint step (default: the best by dev score)")
    parser.add_argument("--index", help="another index: a folder made by rag_jax.build_index, or "
                        "the name of one of the run's own (default: the one that trained)")


def workdir_config(options: argparse.Namespace) -> Config:
    """The configuration of the run that the options name."""
    from rag_jax.documents.workdir import answering
    from rag_jax.training import workdir

    options.workdir = options.workdir or DEFAULT_WORKDIR
    return workdir.read_run(answering(pathlib.Path(options.workdir)), options.run)


def asked_config(options: argparse.Namespace) -> Config:
    """`workdir_config`; or, where no workdir is named, that of the towers that flags name."""
    sources = {name for name in options.changed_fields if name.endswith(".pretrained")}
    if options.workdir is None and sources - {"model.reranker.pretrained"}:
        return Config(runs=(options.run or "rag_token",))
    return workdir_config(options)
