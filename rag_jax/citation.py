"""Where a passage stands in the document that it was read from."""

from typing import Any, NamedTuple


class Citation(NamedTuple):
    """A place in a file.

    Attributes:
      file: its path in the folder that was read, with / between the names.
      span: its first character, and the one after its last, in the text that `documents.read`
        returns.
      pages: all pages that the passage is on, from 1; () = the file has no pages.
      headings: all sections that the passage is in, each as its path of headings, "Setup > Linux";
        () = it is in none.
    """

    file: str
    span: tuple[int, int]
    pages: tuple[int, ...] = ()
    headings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people: "report.pdf, pages 3 to 4", "manual.md, Setup > Linux"."""
        parts = [self.file]
        if self.pages:
            parts.append(f"page{'s' * (len(self.pages) > 1)} {_first_to_last(self.pages)}")
        if self.headings:
            parts.append(_first_to_last(self.headings))
        return ", ".join(parts)

    def record(self) -> dict[str, Any]:
        """The citation as an object of JSON."""
        return {"file": self.file, "span": list(self.span), "pages": list(self.pages),
                "headings": list(self.headings)}

    @classmethod
    def of_record(cls, record: Any) -> "Citation":
        """The inverse of `record`.

        Raises:
          ValueError: it is not a citation's record.
        """
        try:
            file, span, pages, headings = (record[name] for name in cls._fields)
            numbers, texts = [*span, *pages], [file, *headings]
            sound = (len(record) == 4 and len(span) == 2 and 0 <= span[0] <= span[1]
                     and all(type(parts) is list for parts in (span, pages, headings))
                     and all(type(number) is int for number in numbers)
                     and all(page > 0 for page in pages)
                     and all(type(text) is str for text in texts))
        except (TypeError, KeyError):
            sound = False
        if not sound:
            raise ValueError(f"no citation: {record!r:.80}")
        return cls(file, tuple(span), tuple(pages), tuple(headings))


def _first_to_last(parts: tuple) -> str:
    return f"{parts[0]}" if len(parts) == 1 else f"{parts[0]} to {parts[-1]}"
