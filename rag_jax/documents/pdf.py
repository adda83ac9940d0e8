"""PDF, read with PDFium, the library of Chrome."""

import contextlib
import re

from rag_jax.documents.document import Document, Unreadable, Writer

MOST_PAGES = 50_000
# What PDFium returns for a hyphen that divides a word at the end of a line.
_DIVIDED = re.compile("[\x02\ufffe](\r?\n)?")


def read_pdf(content: bytes) -> Document:
    """The text of each page, in the order in which the file draws it."""
    import pypdfium2

    try:
        pdf = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unreadable("it is encrypted, and opens with a password alone; save it without "
                             "one") from None
        raise Unreadable(f"it is damaged, or no PDF: {error}") from None
    if len(pdf) > MOST_PAGES:
        raise Unreadable(f"it has {len(pdf)} pages; divide it into parts of at most {MOST_PAGES}")
    writer, empty, damaged = Writer(), [], []
    for number in range(1, len(pdf) + 1):
        writer.page()
        try:
            page = pdf[number - 1]
            drawn = page.get_textpage()
            text = drawn.get_text_range()
            drawn.close()
            page.close()
        except pypdfium2.PdfiumError:
            damaged.append(number)
            continue
        text = _DIVIDED.sub("", text).strip()
        writer.text(text + "\n")  # no empty line: a sentence may continue on the next page
        if not text:
            empty.append(number)
    if len(empty) + len(damaged) == len(pdf):
        pages = "its page" if len(pdf) == 1 else f"any of its {len(pdf)} pages"
        raise Unreadable(f"no text in {pages}: where it is scanned, let OCR write it into the file")
    remarks = [f"{len(pages)} of {len(pdf)} pages {what}, the first is {pages[0]}"
               for pages, what in ((empty, "have no text (scanned?)"), (damaged, "are damaged"))
               if pages]
    title = ""
    with contextlib.suppress(UnicodeError):  # half of a surrogate pair, in any of its metadata
        title = pdf.get_metadata_value("Title")
    return writer.document(title, tuple(remarks))
