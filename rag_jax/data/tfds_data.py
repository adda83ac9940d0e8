"""Questions as TFDS data sets (array_record): those of TFDS, and our own, written and read.

TensorFlow is never imported: the data sets are read as random-access data sources.
"""

import builtins
import contextlib
import difflib
import functools
import importlib
import io
import json
import os
import re
import sys
import tarfile
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from rag_jax import files
from rag_jax.data.download import DownloadError
from rag_jax.data.question_files import LISTS, Example, collect
from rag_jax.errors import DataError
from rag_jax.visible import is_terminal

_TFDS_READ_SIZE = 1024  # examples per batched read: ten times faster than single reads
# Old-layout builders are unknown to `tfds.builder` until their module has been imported.
_TFDS_MODULES = {"web_questions": "tensorflow_datasets.question_answering.web_questions"}
_CLASS_KEYS = ("pythonClassName", "python_class_name", "type")  # in a features.json
_TFDS_FEATURE = re.compile(r"tensorflow_datasets\.core\.features(\.\w+)+")
_TFDS_DIRECTORY = re.compile(r"(?P<directory>.+?)(?::(?P<split>[A-Za-z]\w*(?:\[[^\]]*\])?))?",
                             re.DOTALL)
_TRIVIA_QA_URL = "http://nlp.cs.washington.edu/triviaqa/data/triviaqa-{}.tar.gz"
_MARK = "rag_jax_fingerprint.json"  # in what `prepare_dataset` wrote
_IMPORTING, _PRINTING = threading.RLock(), threading.RLock()


def prepare_dataset(
    name: str, splits: Mapping[str, Iterable[Example]], directory: str | os.PathLike[str]
) -> None:
    """Writes examples as a TFDS data set (array_record, in the given order), atomically.

    It is prepared beside `directory` and renamed at the end, so that `directory` never holds half
    a data set. One that this function wrote before is replaced. Read it with
    `load_examples("tfds-dir:DIRECTORY:SPLIT")` or `tfds.builder_from_directory(DIRECTORY)`.

    Args:
        name: the data set's name in snake case.
        splits: from the split's name to its examples.
        directory: place of the finished data set.

    Raises:
        DataError: a name that is not snake case; an invalid example; no examples; a directory
            with something else in it.
    """
    directory = Path(directory)
    for kind, value in [("data set", name), *(("split", split) for split in splits)]:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", value):
            raise DataError(f"{kind} name {value!r} is not snake case, such as 'world_2018'")
    if not splits:
        raise DataError(f"data set {name!r} has no splits: give at least one, such as 'train'")
    checked = {}
    for split, examples in splits.items():
        where = f"{name}:{split}"
        rows = ((f"{where} example {i}", Example(*row)) for i, row in enumerate(examples))
        checked[split] = collect(where, rows)
    ours = (directory / _MARK).is_file()
    if directory.exists() and not ours and (not directory.is_dir() or any(directory.iterdir())):
        raise DataError(f"{directory} exists and is not a data set written by rag_jax: name "
                        "another directory, or remove it first")
    with files.new_folder(directory, replace=ours) as content:
        _fill(content, name, checked)


def _fill(folder: Path, name: str, splits: Mapping[str, list[Example]]) -> None:
    """Writes a data set, and the mark that it is ours, into an empty folder."""
    workplace = folder.with_name("tfds")  # beside it: TFDS wants folders of its own
    builder = _question_builder(name, splits, workplace)
    try:
        _download_and_prepare(builder, messages=io.StringIO())  # about temporary paths: discarded
    except RuntimeError as error:  # array_record's, of a full disk too
        raise DataError(f"{folder}: the questions could not be written ({error}); is the disk "
                        "full?") from error
    for file in Path(builder.data_dir).iterdir():
        files.move(file, folder / file.name)
    files.write_json(folder / _MARK, {"examples": {k: len(v) for k, v in splits.items()}})


def _question_builder(name: str, splits: Mapping[str, list[Example]], data_dir: Path) -> Any:
    """Returns an unprepared TFDS builder of these examples, in their order."""
    tfds = _import_tfds()
    from tensorflow_datasets.core.dataset_builders import adhoc_builder

    class Questions(adhoc_builder.AdhocBuilder, skip_registration=True):
        def _info(self):
            info = super()._info()
            info.initialize_from_bucket = lambda: None  # it leaves a folder in /tmp
            return info

        def _split_generators(self, dl_manager):  # the class's own asks TensorFlow for its types
            return {split: ((position, example._asdict()) for position, example
                            in enumerate(examples)) for split, examples in splits.items()}

    texts = tfds.features.Sequence(tfds.features.Text())
    features = dict.fromkeys(Example._fields, texts)
    features |= dict.fromkeys(("id", "question"), tfds.features.Text())
    features["regex"] = tfds.features.Scalar(np.bool_)
    return Questions(name=name, version="1.0.0", features=tfds.features.FeaturesDict(features),
                     description="Questions, answers and passage ids, in the order given.",
                     split_datasets={}, data_dir=data_dir, file_format="array_record",
                     disable_shuffling=True)


@contextlib.contextmanager
def _lazy_imports(**callbacks: Any) -> Iterator[None]:
    """`etils.epy.lazy_imports`, but for this thread alone.

    It replaces `builtins.__import__` while TFDS is imported: a function of another thread, such as
    one of jax that traces, would import lazy modules where it wants classes.
    """
    from etils.epy import lazy_imports_utils

    mine = threading.get_ident()
    with _IMPORTING:
        everywhere = builtins.__import__
        with lazy_imports_utils.lazy_imports(**callbacks):
            lazily = builtins.__import__
            builtins.__import__ = lambda *args, **given: (
                lazily if threading.get_ident() == mine else everywhere)(*args, **given)
            yield


class _OneThread:
    """A stream for all threads but this one, which writes to another."""

    def __init__(self, usual: TextIO, own: TextIO):
        self._usual, self._own, self._thread = usual, own, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(
            self._own if threading.get_ident() == self._thread else self._usual, name)


@contextlib.contextmanager
def _prints_to(messages: TextIO) -> Iterator[None]:
    """`contextlib.redirect_stdout`, but of this thread alone, and of one at a time: of two, the
    last to end would leave the other's stream as sys.stdout."""
    with _PRINTING, contextlib.redirect_stdout(_OneThread(sys.stdout, messages)):
        yield


def _import_tfds() -> types.ModuleType:
    from etils import epy

    epy.lazy_imports = _lazy_imports
    import tensorflow_datasets as tfds  # 0.6 s, so only where it is needed

    if not is_terminal(sys.stderr):
        tfds.disable_progress_bar()
    return tfds


def load_tfds(source: str, data_dir: str) -> list[Example]:
    """Reads a `tfds:` source, as `question_sources.load_examples` says; it is prepared first if it
    is not yet."""
    name, _, split = source.removeprefix("tfds:").partition(":")
    base = name.partition("/")[0]
    tfds = _import_tfds()
    if base in _TFDS_MODULES:
        importlib.import_module(_TFDS_MODULES[base])
    # Where it has no code for a name, TFDS reads what lies in its folder.
    root = Path(data_dir or tfds.core.constants.DATA_DIR).expanduser() / base
    for file in sorted(root.rglob("features.json") if base.isidentifier() else ()):
        _check_features(file)
    try:
        builder = tfds.builder(name, data_dir=data_dir or None, file_format="array_record")
    except Exception as error:  # TFDS raises DatasetNotFoundError, ValueError, AttributeError, ...
        known = {*tfds.list_builders(with_community_datasets=False), *_TFDS_MODULES}
        near = difflib.get_close_matches(base, sorted(known))
        raise DataError(
            f"{source}: no such TFDS data set or configuration (near names: "
            f"{', '.join(near) or 'none'}): {' '.join(str(error).split())}"
        ) from error
    if not builder.data_path.exists():
        try:
            _download_and_prepare(builder, messages=sys.stderr)
        except DataError:
            raise
        except Exception as error:  # no network, changed checksum, full disk, ...
            raise DownloadError(
                f"{source}: not prepared in {builder.data_path} and could not be downloaded "
                f"({error}); prepare it where there is a network and copy that directory here"
            ) from error
    return _read_tfds(source, builder, split or "train")


def load_tfds_directory(source: str) -> list[Example]:
    """Reads a `tfds-dir:` source, as `question_sources.load_examples` says."""
    directory, split = directory_and_split(source)
    if not (directory / "dataset_info.json").is_file():
        raise FileNotFoundError(
            f"{source}: no prepared TFDS data set there (no dataset_info.json): expected "
            "tfds-dir:DIRECTORY[:SPLIT] with a directory written by prepare_dataset"
        )
    _check_features(directory / "features.json")
    builder = _import_tfds().builder_from_directory(str(directory))
    return _read_tfds(source, builder, split)


def directory_and_split(source: str) -> tuple[Path, str]:
    """The two parts of a `tfds-dir:` source; the split is train where none is named."""
    match = _TFDS_DIRECTORY.fullmatch(source.removeprefix("tfds-dir:"))
    if match is None:
        raise DataError(f"{source}: expected tfds-dir:DIRECTORY[:SPLIT]")
    return Path(match["directory"]), match["split"] or "train"


def _check_features(file: Path) -> None:
    """TFDS imports whatever module a features.json names: code that came with the data, say."""
    named: list[Any] = []
    try:
        json.loads(file.read_text("utf-8"),
                   object_hook=lambda value: named.extend(map(value.get, _CLASS_KEYS)))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: damaged ({error}): prepare the data set again") from None
    for name in named:
        if isinstance(name, str) and "." in name and not _TFDS_FEATURE.fullmatch(name):
            raise DataError(f"{file}: names the class {name!r:.80}, which is none of "
                            "tensorflow_datasets.core.features: it is not read")


def _read_tfds(source: str, builder: Any, split: str) -> list[Example]:
    """Reads one split of a prepared builder, batch by batch."""
    splits, whole = builder.info.splits, split.partition("[")[0]
    if whole not in splits:
        raise DataError(f"{source}: no split {split!r}: it has {', '.join(sorted(splits))}")
    try:
        count = splits[split].num_examples
    except ValueError:  # no slice, or one beyond the examples
        count = 0
    if not count:
        raise DataError(f"{source}: no examples in {split!r}: {whole} has "
                        f"{splits[whole].num_examples}; expected a part of them such as "
                        f"{whole}[:10%] or {whole}[10:20]")
    try:
        rows = builder.as_data_source(split=split)
        return collect(source, _tfds_rows(source, rows))
    except DataError:
        raise
    except Exception as error:  # array_record has no exception class of its own
        raise DataError(
            f"{source}: damaged files in {builder.data_path} ({error}): prepare it again"
        ) from error


def _tfds_rows(source: str, rows: Any) -> Iterator[tuple[str, Example]]:
    """Yields (place for errors, example) of a split, each example once: trivia_qa/rc has a question
    of the web's file again in Wikipedia's, and in those that annotators verified."""
    earlier: set[Example] = set()
    for start in range(0, len(rows), _TFDS_READ_SIZE):
        positions = range(start, min(start + _TFDS_READ_SIZE, len(rows)))
        for position, row in zip(positions, rows.__getitems__(positions), strict=True):
            where = f"{source} example {position}"
            example = _tfds_example(where, position, row)
            if example not in earlier:
                yield where, example
            earlier.add(example)


def _tfds_example(where: str, position: int, row: Mapping[str, Any]) -> Example:
    """Makes an Example of a decoded TFDS row (texts are bytes, lists are arrays of bytes)."""
    answers = texts = row.get("answers", row.get("answer"))
    if isinstance(answers, Mapping):  # TriviaQA: a value with aliases; SQuAD: texts with places
        texts = ([answers["value"], *answers["aliases"]] if "value" in answers
                 else answers.get("text"))
    elif isinstance(answers, bytes | str):
        texts = [answers]
    if not _are_texts(texts) or not _are_texts([row.get("question")]):
        raise DataError(
            f"{where}: features {', '.join(map(repr, row))}: expected a text as 'question', and as "
            "'answer(s)' a text, a list of texts, or what TriviaQA and SQuAD have"
        )
    if isinstance(answers, Mapping):  # of several annotators; TriviaQA: "<unk>" where it is hidden
        texts = [text for text in dict.fromkeys(map(_text, texts)) if text != "<unk>"]
    return Example(
        id=_text(row.get("id", row.get("question_id", str(position)))),
        question=_text(row["question"]),
        answers=tuple(map(_text, texts)),
        regex=bool(row.get("regex", False)),
        **{name: tuple(map(_text, row[name])) for name in LISTS if _are_texts(row.get(name))},
    )


def _are_texts(values: Any) -> bool:
    return isinstance(values, list | np.ndarray) and all(
        isinstance(text, bytes | str) for text in values)


def _text(value: bytes | str) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _download_and_prepare(builder: Any, messages: TextIO) -> None:
    """Prepares a builder's data set, with what TFDS prints going to `messages`."""
    tfds = _import_tfds()
    config = tfds.download.DownloadConfig(try_download_gcs=False)  # would ask the network
    if builder.name == "trivia_qa":
        builder._split_generators = functools.partial(_trivia_qa_splits, builder)
    with _prints_to(messages):
        builder.download_and_prepare(file_format="array_record", download_config=config)


def _trivia_qa_splits(builder: Any, downloads: Any) -> dict[str, Iterator]:
    """The splits of TriviaQA's builder, which by itself unpacks and lists files with TensorFlow."""
    config = builder.builder_config
    if not config.exclude_context:
        raise DataError(f"trivia_qa/{config.name}: TFDS reads its evidence with TensorFlow, which "
                        f"is not used: name trivia_qa/{config.name}.nocontext, which has the same "
                        "questions")
    kind, folder = ("unfiltered", "triviaqa-unfiltered") if config.unfiltered else ("rc", "qa")
    archive = Path(downloads.download(_TRIVIA_QA_URL.format(kind)))
    unpacked = archive.with_name(f"{archive.name}.unpacked")
    with tarfile.open(archive, "r|gz") as tar:
        for member in tar:
            if member.name.removeprefix("./").startswith(f"{folder}/"):
                tar.extract(member, unpacked, filter="data")
    ends = {"train": "-train", "validation": "-dev", "test": "test-without-answers"}
    return {split: builder._generate_examples(
        sorted(map(str, (unpacked / folder).glob(f"*{end}.json"))), None, None)
        for split, end in ends.items()}
