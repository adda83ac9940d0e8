"""The text of a file, with its pages and headings."""

import bisect
import dataclasses
import re
from typing import Any

from rag_jax.errors import DataError

LONGEST_TITLE = 200  # characters of a title or a heading; a hostile one could fill every passage
MOST_TEXT = 2**27  # characters of a document
SEPARATOR = " > "  # between the headings of a path
# A raised text that "^" is written before: numbers, and letters that end no ordinal (1st, XXe).
_SIGN, _LETTER = "[-+\u2212\u2013]", "[ijkmnpqtxyzNT]"
_POWER = f"(?:[0-9]{{1,4}}|{_LETTER})"
RAISED = re.compile(f"{_SIGN}?{_POWER}(?:(?:{_SIGN}|[./]){_POWER}|{_LETTER})?{_SIGN}?")
BASE = re.compile(r"[^\W_]|[)\]}]")  # what it follows then


class Unreadable(DataError):
    """A file whose text cannot be read; the message says why, without the file's name."""


class UnreadableNow(Unreadable):
    """A file that is there and cannot be opened, as without permission; it may be soon."""


class ReaderLost(Unreadable):
    """A file whose reader process took too long or crashed; another attempt may succeed."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A whole document as one text, so that a passage may begin on one page and end on the next.

    Attributes:
      title: as the document has it, or "".
      text: the whole text.
      pages: where each page begins in the text; () = it has no pages.
      sections: for each, where it begins in the text, and its headings from the outermost in. Text
        before the first section has no heading.
      remarks: for the list of files: guesses, and what is left out.
      headed: titles of passages include headings; False for tables, whose sections are rows.
    """

    title: str
    text: str
    pages: tuple[int, ...] = ()
    sections: tuple[tuple[int, tuple[str, ...]], ...] = ()
    remarks: tuple[str, ...] = ()
    headed: bool = True

    def pages_of(self, begin: int, end: int) -> tuple[int, ...]:
        """The numbers, from 1, of the pages that characters begin to end - 1 touch."""
        if not self.pages:
            return ()
        first, last = (max(bisect.bisect_right(self.pages, at), 1) for at in (begin, end - 1))
        return tuple(range(first, last + 1))

    def sections_of(self, begin: int, end: int) -> tuple[str, ...]:
        """The paths of headings of the sections that characters begin to end - 1 touch."""
        first = bisect.bisect_right(self.sections, begin, key=lambda section: section[0])
        last = bisect.bisect_left(self.sections, end, key=lambda section: section[0])
        paths = (SEPARATOR.join(path) for _, path in self.sections[max(first - 1, 0) : last])
        return tuple(dict.fromkeys(filter(None, paths)))

    def title_at(self, place: int, usual: str) -> str:
        """The title of a passage that begins at a place: that of the document, and headings.

        usual: used if the document has no title.
        """
        number = bisect.bisect_right(self.sections, place, key=lambda section: section[0])
        path = self.sections[number - 1][1] if number and self.headed else ()
        title = self.title or usual
        return SEPARATOR.join(dict.fromkeys((title, *path)))[:LONGEST_TITLE]

    def record(self) -> dict[str, Any]:
        """The document as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Document":
        """The document of such a `record`, after JSON."""
        return cls(record["title"], record["text"], tuple(record["pages"]),
                   tuple((begin, tuple(path)) for begin, path in record["sections"]),
                   tuple(record["remarks"]), record["headed"])


def clean(text: str) -> str:
    """The text as UTF-8 can hold it: each half of a surrogate pair becomes "?"."""
    return text.encode("utf-8", "replace").decode()


def one_line(text: str) -> str:
    """A title or heading as one line of at most LONGEST_TITLE characters."""
    return clean(" ".join(text[: 8 * LONGEST_TITLE].split())[:LONGEST_TITLE])


class Writer:
    """Collects the parts of a document in their order: pages, headings, texts."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.size = 0  # characters so far
        self.last = ""  # of these
        self.pages: list[int] = []
        self.sections: list[tuple[int, tuple[str, ...]]] = []
        self._open: list[tuple[int, str]] = []  # levels and headings of the current section

    def text(self, text: str) -> None:
        """Appends a text.

        Raises:
          Unreadable: the document is longer than MOST_TEXT.
        """
        self.size += len(text)
        if self.size > MOST_TEXT:
            raise Unreadable(f"it unpacks to more than {MOST_TEXT} characters; divide it")
        self.last = text[-1:] or self.last
        self._parts.append(text)

    def page(self) -> None:
        """Begins a page."""
        self.pages.append(self.size)

    def heading(self, level: int, text: str) -> None:
        """Begins a section. The caller writes its heading, if it is part of the text."""
        heading = one_line(text)
        self._open = [one for one in self._open if one[0] < level]
        if heading:
            self._open.append((level, heading))
        self.sections.append((self.size, tuple(one for _, one in self._open)))

    def document(self, title: str = "", remarks: tuple[str, ...] = ()) -> Document:
        """The document; if `title` is empty, its title is the first heading."""
        first = next((path[0] for _, path in self.sections if path), "")
        return Document(one_line(title) or first, clean("".join(self._parts)), tuple(self.pages),
                        tuple(self.sections), remarks)
