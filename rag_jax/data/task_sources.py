"""The paper's tasks: `task:NAME:SPLIT`, official files located, fetched, read and divided.

`tasks.toml` is the table of them.
"""

import dataclasses
import gzip
import pathlib
import shutil
import tarfile
import warnings
import zlib
from typing import Any, Literal

import farmhash

from rag_jax import files, package_data
from rag_jax.config import MetricFamily
from rag_jax.data.download import download
from rag_jax.data.task_files import READERS, Rows
from rag_jax.errors import DataError

DATA_DIR = "~/rag_jax_data"


@dataclasses.dataclass(frozen=True)
class File:
    """A published file.

    Attributes:
      name: its name in the folder DATA_DIR/TASK.
      url: address for downloads; empty = by hand only, from the task's homepage.
      size: bytes; None = not known.
      sha256: hex; None = not known.
      member: the file meant inside of `name`, a .tar.gz; empty = `name` itself. It may also lie
        unpacked in the folder.
    """

    name: str
    url: str = ""
    size: int | None = None
    sha256: str | None = None
    member: str = ""


@dataclasses.dataclass(frozen=True)
class Split:
    """Some questions of a file.

    Attributes:
      file: the file that holds them.
      read: its format, a name in `task_files.READERS`.
      count: how many there should be, before answers are handled; None = not known.
      half: "train" or "dev" for ORQA's division of a training file, by a hash of the question.
      hidden: the answers are not public; the split can be answered, not scored.
    """

    file: File
    read: str
    count: int | None = None
    half: Literal["", "train", "dev"] = ""
    hidden: bool = False


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of the paper.

    Attributes:
      homepage: page that describes the data.
      licence: licence of the data.
      metrics: the family of metrics that scores it.
      tables: the paper's tables and figures that have results on it.
      trains_on: how answers become training targets (the paper's appendix D): any of the "answers";
        "pairs", one example per question and answer; "retrieved", the answers that occur in the
        first 1000 retrieved passages; "matches", the string that most often matches the regular
        expressions there.
      splits: splits by name; those named train or *_train are handled as `trains_on` says.
      folder: name of the folder in DATA_DIR that holds its files; empty = the task's name.
    """

    homepage: str
    licence: str
    metrics: MetricFamily
    tables: list[str]
    trains_on: Literal["answers", "pairs", "retrieved", "matches"]
    splits: dict[str, Split]
    folder: str = ""


def _read_table() -> dict[str, Task]:
    table = package_data.table(__package__, "tasks.toml")

    def split(file: str, member: str = "", **fields: Any) -> Split:
        return Split(File(file, **table["files"][file], member=member), **fields)

    return {name: Task(**{**task, "splits": {key: split(**each)
                                             for key, each in task["splits"].items()}})
            for name, task in table["tasks"].items()}


TASKS = _read_table()


def held_out(question: str) -> bool:
    """Whether ORQA puts a question of a training file into the development set (one in ten).

    Source: Lee et al. 2019 (ORQA), its data preparation: bucket 0 of 10 of TensorFlow's
    `to_hash_bucket_fast`, which is FarmHash's fingerprint modulo the number of buckets.
    """
    return farmhash.Fingerprint64(question.encode("utf-8")) % 10 == 0


def read_task(source: str, data_dir: str, hidden: bool = False) -> Rows:
    """Yields (place for errors, example), unchecked, of a `task:` source as `load_examples` says.

    Warns when the split has another number of questions than it is known to have.

    Raises:
        DataError: an unknown task or split; a damaged file, named with line or record; a split
            without answers, where not `hidden`.
        FileNotFoundError: a file that must be fetched by hand.
        DownloadError: a file that is not there and could not be downloaded.
    """
    name, split_name = task_of(source)
    task = TASKS[name]
    split = task.splits[split_name]
    if split.hidden and not hidden:
        raise DataError(f"{source}: its answers are not public: it can be answered (python -m "
                         "rag_jax.evaluate --questions), and neither trained on nor scored; "
                         f"{task.homepage} says who scores it")
    folder = _folder(name, data_dir)
    seen = count = 0
    read, path = READERS[split.read], str(locate(folder, split.file, task.homepage))
    rows = read(path, hidden=True) if split.hidden else read(path)
    for where, example in rows:
        seen += 1
        if split.half and held_out(example.question) != (split.half == "dev"):
            continue
        count += 1
        if task.trains_on == "pairs" and split_name.endswith("train"):
            for number, answer in enumerate(example.answers):
                yield where, example._replace(id=f"{example.id}.{number}", targets=(answer,))
        else:
            yield where, example
    if seen and not count:
        raise DataError(f"{source}: none of the {seen} questions in {path} is of this split: a "
                        "hash of its text puts one in ten into dev, the others into train")
    if not count:
        raise DataError(f"{source}: no examples in {path}: expected at least one question; if the "
                        "file is damaged, remove it")
    if split.count not in (None, count):
        warnings.warn(f"{source}: {count} questions where {split.count} are expected: results are "
                      "not comparable with the paper's", stacklevel=2)


def task_of(source: str) -> tuple[str, str] | None:
    """The names of the task and the split of a source; None = it is no task.

    Raises:
        DataError: an unknown task or split.
    """
    if not source.startswith("task:"):
        return None
    name, _, split = source.removeprefix("task:").partition(":")
    if name not in TASKS:
        raise DataError(f"{source}: no task {name!r}: expected task:NAME:SPLIT with NAME one of "
                         f"{', '.join(TASKS)}")
    if split not in TASKS[name].splits:
        raise DataError(f"{source}: no split {split!r} of {name}: it has "
                         f"{', '.join(TASKS[name].splits)}")
    return name, split


def trains_on(source: str) -> str:
    """How a source's answers become training targets, as `Task` says."""
    task = task_of(source)
    return TASKS[task[0]].trains_on if task else "answers"


def locate(folder: pathlib.Path, file: File, homepage: str) -> pathlib.Path:
    """The path of a file, after fetching and unpacking what is not there.

    Args:
        folder: the task's folder. The file may lie there as it is published, or unpacked (without
            its .gz, or the member of its archive, in the archive's folders or not).
        file: the file.
        homepage: the task's, named in the error about a file that has no URL.

    Raises:
        FileNotFoundError: it is not there and has no URL.
        DownloadError: it is not there and could not be downloaded.
        DataError: a damaged archive.
    """
    published = folder / file.name
    for path in _places(folder, file):
        if path.exists():
            return path
    if not published.exists():
        if not file.url:
            raise FileNotFoundError(_by_hand(published, homepage))
        download(file.url, published, file.size, file.sha256)
    if file.member:
        unpacked = _places(folder, file)[1]
        _unpack(published, file.member, unpacked)
        return unpacked
    return published


def _places(folder: pathlib.Path, file: File) -> list[pathlib.Path]:
    """Where a file may lie; one of an archive is unpacked to the second."""
    if file.member:
        return [folder / file.member, folder / pathlib.PurePosixPath(file.member).name]
    published = folder / file.name
    return [published, published.with_name(file.name.removesuffix(".gz"))]


def task_files_of(source: str, data_dir: str) -> list[pathlib.Path]:
    """The file that a `task:` source reads; none where it has not been fetched yet."""
    name, split = task_of(source)
    places = _places(_folder(name, data_dir), TASKS[name].splits[split].file)
    return [path for path in places if path.exists()][:1]


def by_hand(source: str, data_dir: str) -> str:
    """Which file has to be fetched by hand before a `task:` source is read; empty = none."""
    name, split = task_of(source)
    file = TASKS[name].splits[split].file
    if file.url or task_files_of(source, data_dir):
        return ""
    return _by_hand(_folder(name, data_dir) / file.name, TASKS[name].homepage)


def _by_hand(path: pathlib.Path, homepage: str) -> str:
    return (f"no file {path}: fetch {path.name} by hand, as {homepage} says (it has no URL to "
            "download it by), and put it there; config.data.data_dir names the folder that "
            f"{path.parent.name}/ is in")


def data_folder(data_dir: str) -> pathlib.Path:
    """The folder with a folder per task: the one that is named, or else DATA_DIR.

    Raises:
      DataError: it is in the home folder of a user who has none.
    """
    named = data_dir or DATA_DIR
    try:
        return pathlib.Path(named).expanduser()
    except RuntimeError:
        raise DataError(f"{named}: this user has no home; name another folder by "
                        "config.data.data_dir") from None


def _folder(name: str, data_dir: str) -> pathlib.Path:
    return data_folder(data_dir) / (TASKS[name].folder or name)


def _unpack(archive: pathlib.Path, member: str, path: pathlib.Path) -> None:
    """Copies one file out of a .tar.gz; `path` appears when it is whole."""
    files.remove_leftovers(path.parent)
    try:
        # tarfile's own "r|gz" does not compare the checksum at the end, which is read here.
        with gzip.open(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as tar:
            for item in tar:
                if item.isfile() and item.name.removeprefix("./") == member:
                    with files.replaced(path, "wb") as file:
                        shutil.copyfileobj(tar.extractfile(item), file, 1 << 20)
                        while unpacked.read(1 << 20):
                            pass
                    return
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{archive}: damaged archive ({error}): remove it, and it is fetched "
                         "again") from None
    raise DataError(f"{archive}: no {member} in it: remove it, and it is fetched again")
