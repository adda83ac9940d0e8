"""What data hold cannot steer a terminal, a spreadsheet or a page."""

import io
import os
import unicodedata

import pytest

from rag_jax.visible import (
    csv_cell,
    is_terminal,
    markdown,
    shortened,
    visible,
    visible_lines,
)


def test_what_steers_a_terminal_becomes_an_escape():
    """An answer with ESC [ 2 J cleared the screen; an override turned a name round."""
    assert visible("a\x1b[2Jb\x07\r\n\t\x9b\u202etxt\u2066\ud800") == (
        r"a\x1b[2Jb\x07\r\n\t\x9b\u202etxt\u2066\ud800")
    assert visible_lines("a\x1b\nb\r") == "a\\x1b\nb\\r"


def test_no_control_or_direction_character_is_left_and_writing_is():
    for code in range(0x110000):
        char = chr(code)
        steers = (unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cs")
                  or unicodedata.bidirectional(char) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI",
                                                         "RLI", "FSI", "PDI"))
        shown = visible(char)
        assert shown.isascii() and len(shown) > 1 if steers else True, hex(code)
        if unicodedata.category(char)[0] in "LMNPS":
            assert shown == char, hex(code)
    # Joiners belong to a family of emoji, and to Persian words.
    for joined in ("\U0001f468\u200d\U0001f469", "\u0645\u06cc\u200c\u062e\u0648"):
        assert visible(joined) == joined


@pytest.mark.parametrize("text, begins", [
    ("秘鲁共和国位于南美洲西部，首都是利马。" * 9, "秘鲁共和国位于南美洲西部，首都是利马。秘鲁"),
    ("Peru（" + "南米の国である" * 20, "Peru（南米の国である"),
    ("Lima is\na port. " * 9, "Lima is a port. " * 6 + "..."),
])
def test_a_text_is_shortened_whether_or_not_it_has_spaces(text, begins):
    """Of Chinese, Japanese and Thai passages of more than 100 letters, three dots were shown."""
    shown = shortened(text, 100)
    assert shown.startswith(begins) and shown.endswith(" ...") and 90 < len(shown) <= 100
    assert shortened(text[:100], 100) == " ".join(text[:100].split())


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", " =1", "\r=1", "＝1"])
def test_no_cell_is_a_formula(cell):
    assert csv_cell(cell).startswith("'")


def test_cells_that_are_no_formulas_stay():
    assert [csv_cell(text) for text in ("Lima", "a=b", "3-1", "")] == ["Lima", "a=b", "3-1", ""]


def test_markdown_holds_no_html_link_or_end_of_cell():
    assert markdown("<b>&|[x](javascript:y)") == r"&lt;b&gt;&amp;\|[x]\(javascript:y)"


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_bars_are_drawn_on_terminals_that_have_lines():
    """tqdm draws nothing where a terminal tells no size, as some in containers do, and a stream of
    a notebook may not know what a terminal is."""
    import termios

    closed = io.StringIO()
    closed.close()
    assert not any(map(is_terminal, (None, io.StringIO(), object(), closed)))
    for lines in (0, 24):
        with open(os.openpty()[1], "w") as stream:
            termios.tcsetwinsize(stream.fileno(), (lines, 80))
            assert is_terminal(stream) is (lines > 0)
