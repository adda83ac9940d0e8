"""Command lines: `--config=FILE --config.a.b=VALUE` on top of plain argparse options.

Flags are read before jax is imported, so that `--help` and mistakes answer at once.
"""

import argparse
import ctypes
import pathlib
import sys
from collections.abc import Callable, Sequence

from rag_jax import overrides
from rag_jax.config import BART_PRESETS, BERT_PRESETS, EVAL_PRESETS, Config, ConfigError

ROOT = pathlib.Path(__file__).parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.py"
DEFAULT_WORKDIR = "runs/quickstart"


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m rag_jax.{name}", description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter)


def _field_help(config: Config) -> str:
    lines = ["configuration fields (--config.NAME=VALUE), with the defaults of this config:"]
    for name, (hint, _, doc) in overrides.fields().items():
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        shown = ",".join(value) if isinstance(value, tuple) else str(value).lower() if (
            value is None or isinstance(value, bool)) else value
        lines.append(f"  --config.{name}={shown}  ({overrides.type_name(hint)})\n      {doc}")
    for where, presets in (("model.retriever", BERT_PRESETS), ("model.generator", BART_PRESETS),
                           ("eval", EVAL_PRESETS)):
        lines.append(f"presets of --config.{where}: {', '.join(presets)}")
    return "\n".join(lines)


def _changes(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Splits `--config.NAME=VALUE` and `--config.NAME VALUE` from the other arguments."""
    changes, rest, arguments = {}, [], list(argv)
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("--config."):
            rest.append(argument)
            continue
        name, equals, value = argument.removeprefix("--config.").partition("=")
        if not equals:
            if not arguments or arguments[0].startswith("--"):
                raise ConfigError(f"--config.{name}: a value is missing")
            value = arguments.pop(0)
        changes[name] = value
    return changes, rest


def parse_with_config(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None,
                      load: Callable[[argparse.Namespace], Config] | None = None
                      ) -> tuple[argparse.Namespace, Config]:
    """Options and the validated configuration.

    Args:
      parser: with the options of the entry point.
      argv: arguments; None = those of the process.
      load: options -> the configuration that `--config.NAME` flags change; None adds an option
        --config FILE, by default the quickstart's.

    Raises:
      ConfigError: a config file or field that cannot be used.
    """
    if load is None:
        parser.add_argument("--config", default=str(QUICKSTART), metavar="FILE",
                            help=f"python file with get_config() (default: {QUICKSTART.name})")
    changes, rest = _changes(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(rest):
        file = str(QUICKSTART)
        if load is None:  # not for the others: they may have required options, missing here
            file = parser.parse_known_args([a for a in rest if a not in ("-h", "--help")])[0].config
        base = overrides.load_file(file)
        parser.epilog = _field_help(overrides.replace(base, changes))
    options = parser.parse_args(rest)
    base = load(options) if load is not None else overrides.load_file(options.config)
    return options, overrides.validate(overrides.replace(base, changes))


def local_folder(name: str) -> str:
    """The type of a flag that names a folder; pathlib would take gs://b/x for the folder gs:/b/x.

    Raises:
      argparse.ArgumentTypeError: it is a URL.
    """
    if "://" in name:
        raise argparse.ArgumentTypeError(
            f"{name}: must be a folder of this machine; mount a disk or a network share for it")
    return name


def add_workdir(parser: argparse.ArgumentParser) -> None:
    """The options that name a trained model: --workdir, --run, --step, --index."""
    parser.add_argument("--workdir", default=DEFAULT_WORKDIR, type=local_folder,
                        help=f"workdir of rag_jax.train (default: {DEFAULT_WORKDIR})")
    parser.add_argument("--run", help="which of the workdir's runs (default: the first)")
    parser.add_argument("--step", type=int, help="checkpoint step (default: the best by dev EM)")
    parser.add_argument("--index", help="another memory: a folder made by rag_jax.build_index, or "
                        "a name under WORKDIR/indexes (default: the one that trained)")


def workdir_config(options: argparse.Namespace) -> Config:
    """The configuration of the run that the options name."""
    from rag_jax.training import workdir

    config = workdir.read(pathlib.Path(options.workdir))
    run = options.run or config.runs[0]
    if run not in config.runs:
        raise ConfigError(
            f"--run={run}: {options.workdir} has the runs {', '.join(config.runs)}")
    return overrides.for_run(config, run)


def run(main: Callable[[], int | None]) -> None:
    """Calls main() and turns the errors that a user can mend into one message and status 1."""
    keep_memory()
    try:
        code = main()
    except (ValueError, OSError) as error:  # ConfigError and RetrievalError are ValueErrors
        code = f"error: {error}"
    except RuntimeError as error:  # checkpoint and training errors say what to do
        if type(error).__module__.startswith("rag_jax."):
            code = f"error: {error}"
        else:
            raise
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def keep_memory() -> None:
    """Tells glibc to keep freed memory: XLA's CPU buffers then cost no page faults every step.

    Measured in benchmarks/RESULTS.md. Elsewhere than on Linux with glibc it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max, arena_max = -1, -4, -8
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)
        mallopt(arena_max, 1)
