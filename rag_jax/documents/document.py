"""The text of a file, and what stands where in it."""

import bisect
import dataclasses
from typing import Any

from rag_jax.errors import DataError

LONGEST_TITLE = 200  # characters of a title or a heading; a hostile one could fill every passage
MOST_TEXT = 2**27  # characters of a document
SEPARATOR = " > "  # between the headings of a path


class Unreadable(DataError):
    """A file that no text can be had of; the message says why, without the file's name."""


class ReaderLost(Unreadable):
    """A file whose reader took too long or ended: perhaps it could be read at another time."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A whole document as one text, so that a passage may begin on one page and end on the next.

    Attributes:
      title: as the document says, or "".
      text: all of it.
      pages: where each page begins in the text; () = there are no pages.
      sections: (where it begins, its headings from the outermost in); what stands before the first
        stands under none.
      remarks: what a reader of the list of files should know: guesses, what is left out.
      headed: passages have headings in their titles; rows of a table are no headings.
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
        """What a passage that begins there is called: title and headings.

        usual: stands for a title that the document does not say.
        """
        number = bisect.bisect_right(self.sections, place, key=lambda section: section[0])
        path = self.sections[number - 1][1] if number and self.headed else ()
        title = self.title or usual
        return SEPARATOR.join(dict.fromkeys((title, *path)))[:LONGEST_TITLE]

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Document":
        """What `record` gave, after JSON."""
        return cls(record["title"], record["text"], tuple(record["pages"]),
                   tuple((begin, tuple(path)) for begin, path in record["sections"]),
                   tuple(record["remarks"]), record["headed"])


def clean(text: str) -> str:
    """The text without what UTF-8 cannot hold: a "?" stands for each half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def one_line(text: str) -> str:
    """A title or heading: one line, not too long."""
    return clean(" ".join(text[: 8 * LONGEST_TITLE].split())[:LONGEST_TITLE])


class Writer:
    """A document as a reader comes upon its parts: pages, headings, texts."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.size = 0  # characters so far
        self.pages: list[int] = []
        self.sections: list[tuple[int, tuple[str, ...]]] = []
        self._open: list[tuple[int, str]] = []  # levels and headings that what comes stands under

    def text(self, text: str) -> None:
        """Appends a text.

        Raises:
          Unreadable: it is too much.
        """
        self.size += len(text)
        if self.size > MOST_TEXT:
            raise Unreadable(f"it unpacks to more than {MOST_TEXT} characters; divide it")
        self._parts.append(text)

    def page(self) -> None:
        """A page begins."""
        self.pages.append(self.size)

    def heading(self, level: int, text: str) -> None:
        """A section begins, with its heading, which is yet to be written if it is text."""
        heading = one_line(text)
        self._open = [one for one in self._open if one[0] < level]
        if heading:
            self._open.append((level, heading))
        self.sections.append((self.size, tuple(one for _, one in self._open)))

    def document(self, title: str = "", remarks: tuple[str, ...] = ()) -> Document:
        """What was written; its title is the first heading where `title` is empty."""
        first = next((path[0] for _, path in self.sections if path), "")
        return Document(one_line(title) or first, clean("".join(self._parts)), tuple(self.pages),
                        tuple(self.sections), remarks)
