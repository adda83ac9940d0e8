"""A workdir of rag_jax.ingest, and the record of what it was made from.

    config.json    the configuration, as rag_jax.train writes it: which encoder and generator
    ingest.json    the record: the folder, and for each file its digest and passages, or why none
    index/         the index of all passages (retrieval/versions.py)
    trained/       only after training on questions: a workdir of rag_jax.train, whose models answer
"""

import pathlib
from typing import Any, NamedTuple

from rag_jax.errors import UserError
from rag_jax.retrieval.json_files import read_sealed, write_sealed
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.steps import steps_in

# Messages for workdirs without an encoder or a generator.
NO_ENCODER = ("Passages are found by their words (BM25). An encoder finds what is meant: run "
              "rag_jax.ingest again with --config.model.retriever.pretrained=NAME, such as "
              "sentence-transformers/all-MiniLM-L6-v2.")
NO_GENERATOR = ("Passages are shown, and no answers: no generator is named. For answers run "
                "rag_jax.ingest again with --config.model.generator.pretrained=NAME, such as "
                "google/flan-t5-base.")
RECORD, INDEX, TRAINED = "ingest.json", "index", "trained"
LARGEST = 2**31  # bytes of a record: of ten million files
_FIELDS = {"folder": str, "divided_by": dict, "made_by": dict, "index": str, "files": dict}
FileRecords = dict[str, dict[str, Any]]


class Record(NamedTuple):
    """What an index was made from.

    Attributes:
      folder: the folder that was read.
      divided_by: everything besides its content on which the passages of a file depend.
      made_by: everything besides the passages on which the index depends.
      index: the digest of the manifest of the index version that was made.
      files: by name, {"sha256", "passages", "remarks"} of files that were read, {"sha256",
        "reason"} of others. Files that are tried again each time are not recorded; records of
        earlier versions may have them with the digest "".
    """

    folder: str
    divided_by: dict[str, Any]
    made_by: dict[str, Any]
    index: str
    files: FileRecords


def exists(workdir: pathlib.Path) -> bool:
    """Whether a folder is a workdir of rag_jax.ingest."""
    return (workdir / RECORD).is_file()


def answering(workdir: pathlib.Path) -> pathlib.Path:
    """The workdir of the models that answer: this one, or the trained one in it if it has a
    checkpoint."""
    trained = workdir / TRAINED
    done = exists(workdir) and any(
        steps_in(run.parent) for run in trained.glob("*/eval.json"))
    return trained if done else workdir


def write(workdir: pathlib.Path, record: Record) -> None:
    """Replaces the record of a workdir."""
    kept = {name: file for name, file in record.files.items() if file["sha256"]}
    write_sealed(workdir / RECORD, record._replace(files=kept)._asdict())


def read(workdir: pathlib.Path) -> Record:
    """The record of a workdir.

    Raises:
      UserError: it is damaged.
    """
    again = "remove it, and run rag_jax.ingest again"
    try:
        content = read_sealed(workdir / RECORD, most=LARGEST)
    except RetrievalError as error:
        raise UserError(f"{error} Or {again}.") from None
    content.pop("skipped", None)  # of an earlier version: files that are looked at again
    sound = (content.keys() == _FIELDS.keys()
             and all(isinstance(content[name], kind) for name, kind in _FIELDS.items())
             and all(map(_is_file_record, content["files"].values()))
             and isinstance(content["divided_by"].get("chunking"), dict))
    if not sound:
        raise UserError(f"{workdir / RECORD}: is damaged; {again}")
    return Record(**content)


def _is_file_record(value: Any) -> bool:
    """Whether a value is one that `Record.files` has for a file."""
    return isinstance(value, dict) and isinstance(value.get("sha256"), str) and (
        isinstance(value.get("reason"), str)
        or type(value.get("passages")) is int and isinstance(value.get("remarks"), list))
