"""Reads the files of a folder into passages that cite them."""

import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rag_jax.citation import Citation
from rag_jax.documents.chunks import Chunking, Window, passage_id, passages_of
from rag_jax.documents.document import Document, ReaderLost, Unreadable, UnreadableNow
from rag_jax.documents.folder import FolderEntry, content_of
from rag_jax.documents.readers import Readers
from rag_jax.documents.workdir import FileRecords
from rag_jax.errors import UserError
from rag_jax.retrieval.manifest import IndexFolder
from rag_jax.retrieval.protocol import Passage


def with_text(records: FileRecords) -> FileRecords:
    """The records of the files that have been read."""
    return {name: file for name, file in records.items() if "reason" not in file}


def passage_ids(name: str, file: Mapping[str, Any]) -> list[str]:
    """The ids of the passages of a file."""
    return [passage_id(name, number) for number in range(1, file.get("passages", 0) + 1)]


class Reading:
    """Reads the passages of a folder's files, and what the record is to say of the files.

    Attributes:
      citations: of passages that `passages` has yielded, by id; whoever stores a passage takes its
        citation out.
      files: the records of the files, as far as `passages` has come.
      stay: why files cannot be read now whose passages of before are kept instead, by name.
    """

    def __init__(self, entries: list[FolderEntry], kept: FileRecords, chunking: Chunking,
                 folder: pathlib.Path, before: FileRecords):
        """
        Args:
          entries: the files of a folder.
          kept: the records of the files that are not to be read, by name.
          chunking: how documents are divided.
          folder: the folder, for errors.
          before: the records of files whose passages of before can be kept.
        """
        self._entries, self._kept, self._chunking, self._folder = entries, kept, chunking, folder
        self._before, self.stay = before, dict[str, str]()
        self.citations: dict[str, Citation] = {}
        self.files: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, str] = {}
        self._lost: dict[str, Unreadable] = {}  # files that could be opened before, and now cannot

    def passages(self, window: Window | None, index: IndexFolder | None) -> Iterator[Passage]:
        """The passages of all files, in the order of the files' names.

        Args:
          window: of the encoder.
          index: holds the passages of the files that are kept; None leaves these passages out.

        Raises:
          UserError: none of the files has any.
        """
        with Readers() as readers:
            answers = readers.read_each(self._contents())
            for one in self._entries:
                pairs = (self._stored(one.name, self._kept[one.name], index)
                         if one.name in self._kept
                         else self._divided(one.name, next(answers), window, index))
                for passage, citation in pairs:
                    self.citations[passage.id] = citation
                    yield passage
        if not with_text(self.files):
            some = "; ".join(f"{name}: {file['reason']}"
                             for name, file in list(self.files.items())[:3])
            kept = ("; the index is as it was, with the passages of before: put documents into the "
                    "folder, or remove the workdir if they are to be found no more")
            raise UserError(f"{self._folder}: none of its {len(self._entries)} files has a text "
                            f"that can be read{f' ({some})' if some else ''}"
                            f"{kept if index else ''}")

    def _contents(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of the files to read; b"" of a file that cannot be opened any more."""
        for one in self._entries:
            if one.name not in self._kept:
                try:
                    content, self._digests[one.name] = content_of(one)
                except Unreadable as error:  # changed meanwhile; without a digest, it is read again
                    content, self._digests[one.name] = b"", ""
                    self._lost[one.name] = error
                yield one.name, content

    def _stored(self, name: str, file: Mapping[str, Any], index: IndexFolder | None
                ) -> Iterator[tuple[Passage, Citation]]:
        self.files[name] = file
        for known in passage_ids(name, file) if index else ():
            row = index.passages.row_of(known)
            yield index.passages[row], index.passages.source(row)

    def _divided(self, name: str, answer: Document | Unreadable, window: Window | None,
                 index: IndexFolder | None) -> Iterable[tuple[Passage, Citation]]:
        digest, answer = self._digests.pop(name), self._lost.pop(name, answer)
        if isinstance(answer, UnreadableNow) and name in self._before:
            self.stay[name] = str(answer)
            return self._stored(name, self._before[name], index)
        if isinstance(answer, Unreadable):
            tried_again = isinstance(answer, ReaderLost)  # by every call
            self.files[name] = {"sha256": "" if tried_again else digest, "reason": str(answer)}
            return []
        pairs = passages_of(name, answer, self._chunking, window)
        self.files[name] = {"sha256": digest, "passages": len(pairs),
                            "remarks": list(answer.remarks)}
        return pairs
