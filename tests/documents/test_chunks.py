"""Passages of documents: bounded, at ends of sentences, and cited by the place where they stand."""

import random
import unicodedata

import made_files
import pytest

from rag_jax.documents.chunks import LONGEST_WORD, Chunking, Window, passages_of
from rag_jax.documents.document import Document
from rag_jax.documents.read import read_content
from rag_jax.errors import UserError


def texts(text: str, window: Window | None = None, **how: int) -> list[str]:
    return [passage.text for passage, _ in passages_of(
        "a.txt", Document("", text), Chunking(**how), window)]


def letters(titles, given):
    """Tokens of a made-up encoder: a character each, one between title and text, two around."""
    return [len(title) + 1 + len(" ".join(text.split())) + 2
            for title, text in zip(titles, given, strict=True)]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice([
        made_files.sentence(rng, rng.randint(1, 30)) + " ", "\n\n", "x" * rng.randint(1, 200) + " ",
        "漢字かな。", "\r\n", '"Quoted." ', "... ", "\u00a0"]) for _ in range(rng.randint(1, 60)))


@pytest.mark.parametrize("how", [{"words": 20}, {"words": 1}, {"words": 20, "overlap": 10},
                                 {"tokens": 80}, {"tokens": 80, "overlap": 40}])
def test_no_word_is_lost_and_none_is_too_many(how):
    """A passage beyond the window loses its end without a word; one left out is never found."""
    rng = random.Random(1)
    for _ in range(40):
        document = Document("", random_text(rng))
        window = Window(80, letters) if "tokens" in how else None
        found = passages_of("a.txt", document, Chunking(**how), window)
        covered, before = set(), -1
        for number, (passage, citation) in enumerate(found, 1):
            begin, end = citation.span
            assert passage.id == f"a.txt#{number}" and citation.file == "a.txt"
            assert passage.text == " ".join(document.text[begin:end].split())
            assert passage.text and begin > before
            assert "overlap" in how or not covered & set(range(begin, end)), "they are disjoint"
            covered, before = covered | set(range(begin, end)), begin
            if window:
                assert letters(["a.txt"], [passage.text])[0] <= 80
            else:
                assert len(passage.text.split()) <= how["words"]
                assert len(passage.text) <= how["words"] * (LONGEST_WORD + 1)
        lost = "".join(c for at, c in enumerate(document.text) if at not in covered)
        assert not lost.strip(), lost


@pytest.mark.parametrize("how", [{}, {"tokens": 40}])
def test_a_title_that_fills_the_window_leaves_room_for_the_text(how):
    """Every passage was one character, and all had one embedding."""
    document = Document("", "The warranty covers two years from purchase. Spare parts have more.")
    found = passages_of("a/rather/long/path/of/folders/and/name.txt", document, Chunking(**how),
                        Window(40, letters))
    assert 1 < len(found) < 9
    for passage, _ in found:
        assert passage.title == found[0][0].title != ""
        assert letters([passage.title], [passage.text])[0] <= 40


def test_no_passage_begins_with_the_mark_of_a_letter():
    """Thai has no spaces: runs were cut every 40 characters, a vowel from its consonant."""
    text = "เครื่องสูบน้ำมีการรับประกันสองปีนับจากวันที่ซื้อ" * 99
    found = texts(text, words=5)
    assert "".join(found) == text and len(found) > 20
    assert all(unicodedata.category(passage[0])[0] == "L" for passage in found)


def test_no_passage_is_overlap_alone():
    """A heading that begins the next passage was all that this one had of its own."""
    text = ("# Manual\n\n" + " ".join(f"a{i}" for i in range(91))
            + ". Short sentence number one here now ok.\n\n## Heading of the next section\n\n"
            + " ".join(f"w{i}" for i in range(88)) + ". More text here.\n")
    document = read_content("a.md", text.encode())
    spans = [citation.span for _, citation in passages_of(
        "a.md", document, Chunking(words=100, overlap=10))]
    assert len(spans) == 2 and spans[0][1] < spans[1][1]


def test_passages_end_where_sentences_do():
    text = 'One two three. "Four five." Six (seven!) eight nine\n\nten eleven? Twelve'
    assert texts(text, words=5) == [
        'One two three. "Four five."', "Six (seven!) eight nine", "ten eleven? Twelve"]
    assert texts("a b c d e f g. h", words=3) == ["a b c", "d e f", "g. h"], "a long sentence"
    assert texts("It has 3.5 e.g.this end", words=3) == ["It has 3.5", "e.g.this end"]
    assert texts("漢字。かな。字", words=3) == ["漢字。", "かな。", "字"]


def test_overlap_repeats_whole_sentences():
    text = "A b. C d. E f. G h. I j."
    assert texts(text, words=6, overlap=2) == ["A b. C d. E f.", "E f. G h. I j."]
    assert texts(text, words=4, overlap=1) == ["A b. C d.", "E f. G h.", "I j."]


def test_the_papers_chunks_are_what_is_made_of_a_text_without_sentences():
    assert texts(" ".join(map(str, range(250)))) == [
        " ".join(map(str, range(at, min(at + 100, 250)))) for at in (0, 100, 200)]


def test_a_window_bounds_what_words_would_not():
    """OpenScholar's chunks of 256 words lost 30 % in a window of 256 tokens."""
    found = texts("word " * 200, Window(100, letters), words=100)
    assert sum(text.count("word") for text in found) == 200
    assert all(letters(["a.txt"], [text])[0] <= 100 for text in found)
    assert len(texts("\U0001f600" * 40, Window(32, letters), words=100)) > 1, "one long word"


def words_of(titles, given):
    """Tokens of another: a word each, two around."""
    return [2 + len(f"{title} {text}".split()) for title, text in zip(titles, given, strict=True)]


@pytest.mark.parametrize("how, lengths", [({"words": 30}, [20, 20, 20]),
                                          ({"words": 30, "overlap": 5}, [20, 20, 20, 15]),
                                          ({"words": 15, "overlap": 5}, [15, 15, 15, 15, 15, 10])])
def test_in_a_window_of_fewer_words_passages_end_where_sentences_do(how, lengths):
    """They were halved in the middle of short sentences, and repeated nothing."""
    window = Window(48, lambda *given: [2 * size for size in words_of(*given)])
    found = texts("One two three four five. " * 12, window, **how)
    assert [len(text.split()) for text in found] == lengths
    assert all(text.startswith("One") and text.endswith("five.") for text in found)
    long = texts("One two. " + "word " * 40 + "end. Three.", window, words=30)
    assert " ".join(long) == "One two. " + "word " * 40 + "end. Three.", "which alone is cut"


def test_a_long_heading_takes_room_of_its_own_passages_alone():
    """All passages of the document were as short as those under it."""
    def lengths(heading):
        written = f"# T\n\n## {heading}\n\n{'Six words are in this one. ' * 9}\n\n## Other\n\n" + (
            "One two three four five six. " * 30)
        document = read_content("a.md", written.encode())
        found = [passage for passage, _ in passages_of(
            "a.md", document, Chunking(words=100), Window(40, words_of))]
        return [len(one.text.split()) for one in found if "One two" in one.text]

    assert lengths("Short")[1:5] == lengths("Long " * 15)[1:5] == [30] * 4


def test_tokens_are_counted_with_title_and_special_tokens():
    """Without them passages would be cut in the middle, where there are too many."""
    found = texts("One two three. " * 20, Window(40, words_of), tokens=32)
    assert [len(text.split()) for text in found] == [27, 27, 6], "32 less three"


def test_pages_and_sections_that_a_passage_touches_are_cited():
    document = Document("Book", "One. Two. Three.", pages=(0, 7, 12), sections=(
        (0, ("A",)), (10, ("A", "B"))))
    found = passages_of("b.pdf", document, Chunking(words=2))
    assert [(p.text, p.title, c.pages, c.headings) for p, c in found] == [
        ("One. Two.", "Book > A", (1, 2), ("A",)), ("Three.", "Book > A > B", (2, 3), ("A > B",))]
    assert document.pages_of(0, 7) == (1,) and document.pages_of(6, 8) == (1, 2)
    one = passages_of("b.pdf", document, Chunking())
    assert one[0][1].pages == (1, 2, 3) and one[0][1].headings == ("A", "A > B")


def test_no_passage_ends_with_a_heading():
    """It would be cited for a section of which it has nothing."""
    document = read_content("a.md", b"Some words before.\n\n# One\n\n## Two\n\nThe text there.")
    found = passages_of("a.md", document, Chunking(words=7))
    assert [p.text for p, _ in found] == ["Some words before.", "# One ## Two The text there."]
    assert found[0][1].headings == () and found[1][1].headings == ("One", "One > Two")
    rows = read_content("a.csv", b"a\n" + b"1\n" * 6)
    assert [c.headings for _, c in passages_of("a.csv", rows, Chunking(words=6))] == [
        ("row 2", "row 3", "row 4"), ("row 5", "row 6", "row 7")]


@pytest.mark.parametrize("how", [{"words": 20}, {"words": 20, "overlap": 5}, {"tokens": 32}])
def test_a_row_that_fits_into_a_passage_is_not_divided(how):
    """Half of an answer was in a passage with half of the next question."""
    drawn = random.Random(0)
    rows = [[f"Is it {n}{' or' * drawn.randrange(4)}?",
             f"{'Yes so. ' * drawn.randrange(1, 4 if n % 7 else 30)}{'' if n % 7 else 'So ' * 19}"]
            for n in range(60)]
    document = read_content("a.csv", "\n".join(["q,a", *map(",".join, rows)]).encode())
    found = [p.text for p, _ in passages_of("a.csv", document, Chunking(**how),
                                            Window(40, words_of))]
    most = 32 - 3 if "tokens" in how else 20  # the title and special tokens
    written = [f"q: {q}; a: {a.strip()}" for q, a in rows]
    short = [row for row in written if len(row.split()) <= most]
    assert 20 < len(short) < 60 and all(any(row in text for text in found) for row in short)
    assert any(text.count("q: ") > 1 for text in found), "short ones share a passage"
    assert all(len(text.split()) <= most for text in found)


@pytest.mark.parametrize("before, passages", [("", 4), ("Some text.\n\n", 5)])
def test_headings_in_a_row_are_passages_together(before, passages):
    """Of a table of contents, each was a passage of its own."""
    text = before + "".join(f"## Part number {n}\n\n" for n in range(100))
    found = passages_of("a.md", read_content("a.md", text.encode()), Chunking())
    assert len(found) == passages and max(len(p.text.split()) for p, _ in found) == 100
    text += " ".join(["word"] * 90)
    *_, last = passages_of("a.md", read_content("a.md", text.encode()), Chunking())
    assert last[0].text.startswith("## Part number 98 ## Part number 99 word")


def test_planted_sentences_are_cited_by_their_page_and_heading(tmp_path):
    """The figure of benchmarks/documents.py, of 200 sentences."""
    found = made_files.planted(tmp_path, 200)
    documents = {one.file: read_content(one.file, (tmp_path / one.file).read_bytes())
                 for one in found}
    cited = {name: passages_of(name, document, Chunking(words=40))
             for name, document in documents.items()}
    assert {one.file[-3:] for one in found} == {"pdf", "ocx", "tml", ".md"}
    for one in found:
        text = documents[one.file].text
        holding = [citation for _, citation in cited[one.file] if one.sentence in " ".join(
            text[slice(*citation.span)].split())]
        assert len(holding) == 1, "at the end of a sentence, so whole"
        assert one.page in holding[0].pages if one.page else one.heading in holding[0].headings


@pytest.mark.parametrize("how, says", [
    ({"words": 0}, "0 words"), ({"overlap": -1}, "overlap -1"), ({"tokens": 8}, "8 tokens"),
    ({"words": 10, "overlap": 6}, "at most half of a passage, 5"),
    ({"tokens": 50}, "of which encoder"), ({"tokens": 90}, "the encoder reads 80")])
def test_numbers_that_cannot_be_are_refused(how, says):
    with pytest.raises(UserError, match=says):
        texts("a", Window(80, letters) if "90" in str(how) else None, **how)
