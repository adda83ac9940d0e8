"""What is read of each kind of file, and what is refused: files come from anywhere."""

import codecs
import csv
import json
import random
import sys

import pytest
from made_files import STYLES, W, docx, paragraph, pdf, zipped

from rag_jax.documents import document, read
from rag_jax.documents import docx as docx_reader
from rag_jax.documents import pdf as pdf_reader
from rag_jax.documents.document import Document, Unreadable
from rag_jax.documents.read import read_content

WORDS = "Äpfel, 東京 and more."


def of(name: str, content: bytes | str) -> Document:
    return read_content(name, content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "A.HTM"])
def test_encodings_that_a_file_says_are_read(name, encoding):
    found = of(name, WORDS.encode(encoding))
    assert found.text.strip() == WORDS and not found.remarks
    assert name[-3:] not in ("txt", ".md") or found.text == WORDS, "a span counts from the text"


@pytest.mark.parametrize("encoding, text", [
    ("cp1252", "Die Straße über die Brücke führt nach München – wo Bäcker früh öffnen."),
    ("cp1250", "Zażółć gęślą jaźń, powiedział Łukasz w środę rano."),
    ("iso8859-2", "Zażółć gęślą jaźń, powiedział Łukasz w środę rano."),
    ("cp1251", "Столица России находится на берегу реки Москвы."),
    ("koi8-r", "Столица России находится на берегу реки Москвы."),
    ("cp1253", "Η πρωτεύουσα της Ελλάδας είναι η Αθήνα."),
    ("cp1254", "Türkiye'nin başkenti Ankara'dır, en kalabalık şehri İstanbul'dur."),
    ("cp1255", "בירת ישראל היא ירושלים, עיר עתיקה."), ("cp1256", "عاصمة مصر هي القاهرة."),
    ("cp874", "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย"),
    ("cp932", "日本の首都は東京であり、人口は約①千四百万人です。"),
    ("cp949", "대한민국의 수도는 서울이며 인구는 약 천만 명이다. 똠방각하"),
    ("gb18030", "中国的首都是北京，人口超过两千万。"),
    ("big5", "臺灣的首都是臺北，人口約兩百五十萬。")])
def test_an_encoding_is_guessed_from_one_sentence_and_named(encoding, text):
    """A guess may be wrong: who reads the list must be able to see it."""
    found = of("a.txt", text.encode(encoding))
    assert found.text == text and "by a guess" in found.remarks[0]


@pytest.mark.parametrize("content, told", [
    ("Die Größe der Straße. ".encode("cp1252") + b"\x81", "byte 6 .* byte 22 is not windows-1252"),
    (bytes(range(128, 256)) * 3, "byte 0 is not UTF-8, and byte [0-9]+ is not")])
def test_a_text_that_is_not_what_is_guessed_is_refused_and_the_byte_is_named(content, told):
    """The byte that was named was a sound one. Most bytes are something in some encoding."""
    with pytest.raises(Unreadable, match=told):
        of("a.txt", content)


@pytest.mark.parametrize("name", ["a.txt", "a.html"])
@pytest.mark.parametrize("text, bad", [
    ("Die Prüfung der Wärmepumpe beträgt fünf Jahre. ", b"\xc3"), ("保修期为两年。", b"\xe4\xbf"),
    ("Гарантия на насос составляет два года. ", b"\xd0")])
def test_a_file_that_is_cut_within_a_character_is_read_as_what_it_is(name, text, bad):
    """One byte made mojibake of a whole document, or had it refused."""
    page = '<meta charset="utf-8"><p>' if name == "a.html" else ""
    found = of(name, f"{page}{text}\n{text}".encode() + bad)
    assert found.text.split() == f"{text}\n{text}\ufffd".split()
    assert found.remarks == ("one character is no utf-8, but damaged, in line 2 first",)


@pytest.mark.parametrize("mark, encoding, bad", [
    (codecs.BOM_UTF8, "utf-8", b"\xff"), (codecs.BOM_UTF16_BE, "utf-16-be", b"\xd8\x01")])
def test_a_byte_order_mark_does_not_refuse_a_file_of_which_little_is_damaged(mark, encoding, bad):
    """It was read without the mark."""
    text = "Die Prüfung der Wärmepumpe beträgt fünf Jahre."
    found = of("a.txt", mark + text.encode(encoding) + bad + text.encode(encoding))
    assert found.text == f"{text}\ufffd{text}"
    assert found.remarks == (f"one character is no {encoding}, but damaged, in line 1 first",)


@pytest.mark.parametrize("name, encoding, text", [
    ("iso-8859-9", "cp1254", "“İstanbul”"), ("x-sjis", "cp932", "日本語①㈱"),
    ("shift_jis", "cp932", "日本語①㈱"), ("windows-874", "cp874", "กรุงเทพ"),
    ("gb2312", "gb18030", "朱镕基"), ("EUC-KR", "cp949", "똠방각하")])
def test_a_name_of_an_encoding_means_what_browsers_take_it_for(name, encoding, text):
    assert of("a.html", f'<meta charset="{name}"><p>{text}'.encode(encoding)).text.strip() == text


@pytest.mark.parametrize("content, says", [
    (b"PK\x03\x04\0\0\0", "zero bytes"), (b"\xf0\x01 a\x02" * 99, "control"),
    (codecs.BOM_UTF16_LE + b"\x00\xd8", "utf-16"),
    (codecs.BOM_UTF8 + b"a\xff", "byte 4 is not"), (b"", "empty"), (b" \r\n\t", "empty")])
def test_what_is_no_text_is_refused(content, says):
    with pytest.raises(Unreadable, match=says):
        of("a.txt", content)


def test_a_page_is_read_in_the_encoding_that_it_says():
    said = '<meta http-equiv="content-type" content="text/html; charset=iso-8859-1"><p>“Ä”'
    assert of("a.html", said.encode("cp1252")).text.strip() == "“Ä”"
    declared = '<?xml version="1.0" encoding="windows-1250"?><html><body><p>Łódź, ś'
    found = of("a.xhtml", declared.encode("cp1250"))
    assert found.text.strip() == "Łódź, ś" and not found.remarks
    declared = '<?xml version="1.0" encoding="macintosh"?><meta charset="koi8-r"/><p>Größe</p>'
    assert of("a.xhtml", declared.encode("mac-roman")).text.strip() == "Größe"
    assert of("a.html", declared.encode("koi8-r", "replace")).text.strip() == "Gr??e"
    for name in ("latin-1", "iso_8859-1:1987", "l1", "cp819", "cp936"):
        page, encoding = f'<meta charset="{name}"><p>', "gbk" if name == "cp936" else "cp1252"
        text = "中国" if name == "cp936" else "é ’"
        assert of("a.html", (page + text).encode(encoding)).text.strip() == text
    page = '<meta charset="X_SJIS"><p>日本'  # no name that Python knows
    found = of("a.html", page.encode("cp932"))
    assert found.text.strip() == "日本" and not found.remarks, "nothing is guessed"
    hidden = '<!-- <meta charset="koi8-r"> --><p>Привет'
    assert of("a.html", hidden).text.strip() == "Привет", "a comment says nothing"
    for name in ("no-such-thing", "zip", "hex", "utf-16", "charmap", "UTF-7", "punycode", "cp037",
                 "utf16", "utf_16_le", "utf-32"):
        assert of("a.html", f'<meta charset="{name}"><p>{WORDS}').text.strip() == WORDS


def test_what_a_page_hides_is_no_text_of_it():
    """It was found by its words, and cited where no reader sees it."""
    found = of("a.html", """<p hidden>one</p><div style="color: red; DISPLAY : none"><h2>two</h2>
        three</div><h2 hidden="">four</h2><p style="visibility:hidden">five</p>
        <p hidden="until-found">six <b style="display:block">seven</b><i hidden>eight</i>""")
    assert found.text.split() == ["six", "seven"] and not found.sections


def test_what_stands_for_a_film_a_dialog_or_a_list_is_no_text():
    """It is shown by browsers that cannot show the thing itself, or not before it is opened."""
    found = of("a.html", """<p>one<video>no video</video><audio>no audio</audio>
        <canvas>no canvas</canvas><dialog>closed</dialog><dialog open>two</dialog>
        <datalist><option>offered</datalist><ruby>three<rp>(</rp></ruby>""")
    assert found.text.split() == ["one", "two", "three"]


XHTML = """<html xmlns="http://www.w3.org/1999/xhtml"><head><title/>{}</head><body><h1>Pump</h1>
<p class="a > b">two<br/>years <a id='x/'/><i>of</i> <![CDATA[a < b && "c"]]></p>{}</body></html>"""


@pytest.mark.parametrize("name, first", [("a.xhtml", ""), ("a.html", '<?xml version="1.0"?>')])
@pytest.mark.parametrize("head", ["", '<script src="a.js" />', "<style/>", '<?php "a > b" ?>',
                                  "<script><![CDATA[\nif (a < b) '</script><p>no';]]></script>"])
@pytest.mark.parametrize("inside", ['<iframe src="x"/>', "<select/>", "<!-- <p/> -->", "<div\n/>"])
def test_an_empty_element_of_xhtml_ends_where_it_begins(name, first, head, inside):
    """All that followed it was no text, and a text without markup was none either."""
    found = of(name, first + XHTML.format(head, inside + "<p>after</p>"))
    assert found.text.split() == 'Pump two years of a < b && "c" after'.split()
    assert found.title == "Pump" and "two\nyears" in found.text
    assert found.sections == ((found.text.index("Pump"), ("Pump",)),)


@pytest.mark.parametrize("open_one", [
    "<!--", "<?", "<![CDATA[", "<a ", "<a '", '<a "', "<a b='>'", "<!DOCTYPE", "<!DOCTYPE x [",
    "<!DOCTYPE x [<!-- ]"])
def test_markup_of_xhtml_that_nothing_ends_takes_no_time(open_one):
    """What follows would be read again from each of them."""
    found = of("a.xhtml", "<html><body><p>one</p>" + open_one * 50_000)
    assert found.text.split()[0] == "one"


def test_declarations_in_the_type_of_xhtml_are_no_text():
    """All of it was the text of the page, which lost its title."""
    kind = '<!DOCTYPE html SYSTEM "[" [ <!ENTITY c "Lima"> <!ELEMENT p ANY> ] >'
    found = of("a.xhtml", kind + XHTML.format("", "<p>a [b] &gt; c</p>"))
    assert found.title == "Pump" and found.text.split()[-4:] == "a [b] > c".split()
    assert "ENTITY" not in found.text and "]" not in found.text.split("a [b]")[0]


def test_styles_that_hide_nothing_leave_the_text():
    """Names that end as those that hide left it out."""
    found = of("a.html", """<div style="backface-visibility: hidden; -webkit-backface-visibility:
        hidden"><p>one</div><p style="--x-display:none">two<p style="x:y;display:none">three""")
    assert found.text.split() == ["one", "two"]


def test_html_is_what_a_browser_shows():
    found = of("a.html", """<title> The &amp;
        title</title><style>p {x}</style><body><h1>One <b>big</b></h1>zero<p>first<br>line
        and<i>so</i> on<script>no()</script><ul><li>a<li>b</ul><h3>Deep</h3>text<h2>Two</h2>end""")
    assert found.title == "The & title" and found.pages == ()
    assert found.text.split() == "One big zero first line andso on a b Deep text Two end".split()
    assert [(found.text[at:].split()[0], path) for at, path in found.sections] == [
        ("One", ("One big",)), ("Deep", ("One big", "Deep")), ("Two", ("One big", "Two"))]
    assert "first\nline and" in found.text and "\n\n" in found.text, "blocks are paragraphs"


def test_only_blocks_divide_a_line():
    """Elements that HTML does not know, or that were forgotten, tore words and sentences."""
    found = of("a.html", """<p>Hello <x-term>wor</x-term>ld, <nobr>New York</nobr>,
        <output>42</output> <picture><img></picture>a<script>no()</script>nd <slot>so</slot> on
        <section>two</section>three<svg>no</svg>four<button>five</button>""")
    lines = [" ".join(line.split()) for line in found.text.split("\n\n") if line.strip()]
    assert lines == ["Hello world, New York, 42 and so on", "two", "three", "four", "five"]


def test_the_equations_of_a_page_are_read():
    """E to the power of 2 was "E 2", in two paragraphs; one half would be 12."""
    found = of("a.html", """<p>It is <math><msup> <mi>E</mi> <mrow><mo>-</mo><mn>2</mn></mrow>
        <mn>7</mn></msup><mo>=</mo><mfrac><mn>1</mn><!-- -->
        <mn>2</mn></mfrac><msubsup><mi>m</mi><mn>0</mn><mn>3</mn></msubsup><semantics><mi>c</mi>
        <annotation>c^2</annotation></semantics><msub><mi>v</mi><mi>x</mi></msub></math> here.""")
    assert "".join(found.text.split()) == "ItisE^(-2)7=1/2m_0^3cv_xhere."
    rows = "<mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow> <mrow><mi>n</mi></mrow>"
    for tag, shown in (("mfrac", "(a+b)/n"), ("mroot", "(a+b)^(1/n)"), ("msub", "(a+b)_n"),
                       ("munder", "(a+b)_n"), ("mover", "(a+b)^n"), ("msqrt", "√(a+b)n")):
        assert of("a.html", f"x <math><{tag}>{rows}</{tag}></math>").text.strip() == f"x {shown}"
    for inside, shown in (
            ("<msup><mi>c</mi><mrow>\n<mn>2</mn>\n</mrow></msup>", "c^ 2 "),
            ("<mfrac><mrow><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow></mrow><mn>2</mn></mfrac>",
             "(a+b)/2"),
            ("<msup><mfrac><mn>1</mn><mn>2</mn></mfrac><mn>3</mn></msup>", "(1/2)^3"),
            ("<msup><mi>x</mi><mrow></mrow></msup>", "x"),
            ("<mi>z</mi><mfrac><mfrac></mfrac></mfrac>", "z")):
        found = of("a.html", f"<math>{inside}</math>").text
        assert " ".join(found.split()) == " ".join(shown.split()), inside
    found = of("a.html", "<p>one<math display=block><mi>x</mi></math>two")
    assert found.text.split() == ["one", "x", "two"]
    assert of("a.html", "<p>a<math><mfrac>" + "<!---->" * 50_000).text.strip() == "a"
    found = of("a.html", "<math><mtable><mtr><mtd>1</mtd><mtd>2</mtd></mtr></mtable></math>")
    assert found.text.split() == ["1", "2"]
    assert of("a.html", "<p>x<math><mfrac>1<b>2").text.strip() == "x2"


EQUATION = "<math><msup><mi>c</mi><mn>2</mn></msup></math>"


@pytest.mark.parametrize("page", [
    f'<span class="x mwe-math-mathml-a11y" style="display: none">{EQUATION}</span><img src="x">',
    f'<span class="katex-mathml">{EQUATION}</span><span class="katex-html">c2</span>',
    '<span class="katex"><span class="katex-html">c<sup>2</sup></span></span>'])
def test_an_equation_is_read_once_where_style_sheets_show_it(page):
    """MediaWiki hides it and shows a picture; KaTeX hides it and shows its pieces."""
    assert of("a.html", f"<p>E=m{page} is").text.strip() == "E=mc^2 is"


def test_a_link_that_says_what_it_is_may_stand_alone_and_be_saved_whole():
    link = '<a class="headerlink" href="https://a.org/p.html#t">\u00b6</a>'
    page = of("a.html", f"<h2>Title<span>{link}</span></h2>")
    assert page.sections[0][1] == ("Title",) and page.text.split() == ["Title"]


def test_links_that_are_all_of_a_heading_or_lead_elsewhere_stay():
    page = of("a.html", '<h2><a href="#num">#</a></h2><dl><dt><a href="#hash">#</a><dd>x</dl>'
                        '<h2><a href="law.html#s5">\u00a7</a> 5 Liability</h2>')
    assert page.text.split() == "# # x \u00a7 5 Liability".split()
    assert [path for _, path in page.sections] == [("#",), ("\u00a7 5 Liability",)]


@pytest.mark.parametrize("link", [
    '<a class="headerlink" href="#x">\u00b6</a>', '<a href="#x">#</a>', '<a href="#x"> \u200b</a>',
    '<a href="#x">\u00a7</a>', '<a href="#x">\U0001f517</a>'])
def test_the_link_of_a_heading_to_itself_is_no_part_of_it(link):
    """Every citation, title and search had it."""
    page = of("a.html", f"<h1>Setup{link}</h1><h2>{link}In C#</h2><dl><dt>f(x){link}</dt></dl>"
                        '<p><span>A figure</span><a class="headerlink" href="#f">\u00b6</a></p>'
                        '<p>See <a href="#p">\u00a7</a> 5, <a href="#q">C#</a></p>'
                        '<h2><a href="#r">#<b>1</b></a> in C</h2>')
    assert [path[-1] for _, path in page.sections] == ["Setup", "In C#", "#1 in C"]
    assert page.text.split() == "Setup In C# f(x) A figure See \u00a7 5, C# #1 in C".split()


def test_headings_and_titles_are_what_is_shown_of_them():
    found = of("a.html", """<body><svg><title>menu</title></svg><h1>Shown<span
        style="display:none">HID</span><script>var x</script> and<br>more</h1>text""")
    assert found.title == "Shown and more"
    assert [path for _, path in found.sections] == [("Shown and more",)]
    found = of("a.md", "Title of two\nlines here\n=====\ntext")
    assert [path for _, path in found.sections] == [("Title of two lines here",)]


def test_markdown_has_the_headings_that_its_readers_see():
    text = ("---\ntitle: x\n---\r\nbefore\r\n\r\n# One `code` *x*\r\ntext\r\n```\r\n"
            "# no heading\r\n```\rTwo\r---\rmore\n\n> # quoted\n\n### Three\nend")
    found = of("a.md", text)
    assert found.text == text, "spans are those of the file"
    assert [(found.text[at:].split()[0], path) for at, path in found.sections] == [
        ("#", ("One code x",)), ("Two", ("One code x", "Two")),
        ("###", ("One code x", "Two", "Three"))]


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_a_rule_at_the_beginning_of_markdown_hides_no_headings(end):
    """Up to the next rule they were taken for its front matter."""
    lines = ["---", "", "# Pump", "", "text", "", "---", "", "# Other", ""]
    assert [path for _, path in of("a.md", end.join(lines).encode()).sections] == [
        ("Pump",), ("Other",)]
    lines[1:2] = ["# a remark of YAML", ""]
    assert [path for _, path in of("a.md", end.join(lines).encode()).sections] == [("Other",)]


@pytest.mark.parametrize("name, content", [
    ("a.csv", 'name;note\nLima;"a; b"\n;\nCusco;"two\nlines"\n'),
    ("a.tsv", 'name\tnote\nLima\t"a; b"\n\t\nCusco\t"two\nlines"\n'),
    ("a.jsonl", '{"name": "Lima", "note": "a; b"}\n\n{"name": null}\n'
                '{"name": "Cusco", "note": "two\\nlines"}')])
def test_a_row_of_a_table_is_a_paragraph_cited_by_its_number(name, content):
    found = of(name, content)
    assert found.text == "name: Lima; note: a; b\n\nname: Cusco; note: two\nlines\n\n"
    last = 4
    assert [path for _, path in found.sections] == [
        (f"row {1 if name == 'a.jsonl' else 2}",), (f"row {last}",)]
    assert found.title == "" and found.title_at(5, "usual") == "usual", "rows are no titles"


def test_columns_of_one_name_or_of_none_are_all_read():
    assert of("a.csv", "a,a,\n1,2,3,4\n5\n").text == "a: 1; a: 2; 3; column 4: 4\n\na: 5\n\n"


def test_a_quote_that_is_never_closed_is_told():
    """All rows after it were one, and nobody knew."""
    found = of("a.tsv", 'id\ttext\n1\t"Quoted start\n2\tnext\n')
    assert found.text == 'id: 1; text: "Quoted start\n\nid: 2; text: next\n\n'
    assert found.remarks == ("a quote is never closed: quotes are read as they are",)
    found = of("a.csv", 'id,text\n1,"Quoted start\n2,next\n')
    assert found.remarks == ("a quote is never closed: all that follows it is one field",)
    assert not of("a.csv", 'id,text\n1,"a ""b"" c"\n2,5" wide\n').remarks


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@pytest.mark.parametrize("name, between", [("a.tsv", "\t"), ("a.csv", ",")])
def test_a_quote_that_is_never_closed_is_told_after_one_that_is_lax(name, between, end):
    """The lax one ended the look for it."""
    lines = ["id,text", '1,"Hello" she said', '2,"never closed', "3,next", ""]
    found = of(name, end.join(lines).replace(",", between).encode())
    assert len(found.remarks) == 1 and "never closed" in found.remarks[0]
    sound = [line for line in lines if "never" not in line] + ['4,"the last line is ""quoted"""']
    assert not of(name, end.join(sound).replace(",", between).encode()).remarks


def test_rows_that_two_lax_quotes_enclose_are_not_joined_without_a_word():
    """Two quotes of texts in different rows made one row of all rows between them."""
    lines = 'id,text|1,"said" he|2,"quoted start|3,fine|4,x"y|5,"whole"|'.replace("|", "\n")
    found = of("a.tsv", lines.replace(",", "\t"))
    assert [path for _, path in found.sections] == [(f"row {row}",) for row in range(2, 7)]
    assert 'id: 2; text: "quoted start\n\nid: 3; text: fine\n' in found.text
    assert found.remarks == ("a quote of an earlier line is closed within a field, in line 5: "
                             "quotes are read as they are",)
    found = of("a.csv", lines)
    assert "id: 2; text: quoted start\n3,fine\n4,xy\n\nid: 5; text: whole" in found.text
    assert found.remarks == ("a quote of an earlier line is closed within a field, in line 5: all "
                             "between them is one field",)


@pytest.mark.parametrize("content, rows", [
    ('id, text\n1, "a, b"\n2,  "c ""d"""\n', ["id: 1; text: a, b", 'id: 2; text: c "d"']),
    ('"a", "b;c"\n1, "x;y"\n', ["a: 1; b;c: x;y"]),
    ('id, text\n1, "a, b"\n2, "c\nd, e"\n"3\n4", "f, g"\n',
     ["id: 1; text: a, b", "id: 2; text: c\nd, e", "id: 3\n4; text: f, g"]),
    ('item, place, n\nbolt, 1, 1\nnut, ", 2\nscrew, ", 3\n',
     ["item: bolt; place: 1; n: 1", 'item: nut; place: "; n: 2', 'item: screw; place: "; n: 3']),
    ('id, text\n1, "Yes" she said\n', ['id: 1; text: "Yes" she said']),
    ('id, text, n\n1, " no quote, a\n2, x, b\n',
     ['id: 1; text: " no quote; n: a', "id: 2; text: x; n: b"])])
def test_quotes_after_spaces_are_those_of_fields_where_all_are(content, rows):
    """Fields were cut at their commas; and a lone quote is one of the text."""
    found = of("a.csv", content)
    assert found.text.split("\n\n")[:-1] == rows and not found.remarks


def test_quotes_that_tables_have_for_line_ends_are_not_told():
    """A row with one lax quote, and one with a line end in its quotes."""
    rows = '1\t"x" y\t"multi\na\t"\n2\t"ok"\t"fine"\n3\t"two\nlines"\t"""q"""\n'
    found = of("a.tsv", f"id\ttext\tmore\n{rows}")
    assert len(found.sections) == 3 and not found.remarks
    assert 'id: 3; text: two\nlines; more: "q"' in found.text


def test_a_table_may_say_its_separator_and_begin_with_empty_lines():
    for text, row in (("sep=;\na;b,c,d\n1;2\n", "a: 1; b,c,d: 2"),
                      ("\n\na;b;c,d\n1;2\n", "a: 1; b: 2")):
        found = of("a.csv", text)
        assert found.text == f"{row}\n\n"
        assert found.sections[0][1] == (f"row {text.count(chr(10))}",)


@pytest.mark.parametrize("content, text", [
    ("name;text\rLima;one, two, three\r", "name: Lima; text: one, two, three"),
    ("sep=;\ra;b,c,d\r1;2\r", "a: 1; b,c,d: 2"),
    ('"a, b, and c";d\n1;2\n', "a, b, and c: 1; d: 2"),
    ('"a ""b, c"" and, d";e\n1;2\n', 'a "b, c" and, d: 1; e: 2'),
    ('5" wide, tall;b;c\n1;2;3\n', '5" wide, tall: 1; b: 2; c: 3'),
    ('a;"b,\nc,,";d\n1;2;3\n', "a: 1; b,\nc,,: 2; d: 3")])
def test_the_separator_is_that_of_the_first_line_outside_of_quotes(content, text):
    """Those of all lines were counted where lines end in \\r, and those in quotes."""
    assert of("a.csv", content).text == text + "\n\n"


@pytest.mark.parametrize("content, text", [
    ('"Ort\nam Rhein";"Preis\r\nin, Euro";Kilo\nBonn;1,50;2\n',
     "Ort\nam Rhein: Bonn; Preis\r\nin, Euro: 1,50; Kilo: 2"),
    ("Ort;Preis, netto;Preis, brutto\nBonn;1,50;2,00\nKiel;3,10;4,00\n",
     "Ort: Bonn; Preis, netto: 1,50; Preis, brutto: 2,00\n\n"
     "Ort: Kiel; Preis, netto: 3,10; Preis, brutto: 4,00"),
    ("Name;Price (net, EUR)\nSeal;10", "Name: Seal; Price (net, EUR): 10"),
    ("Name;Price, size, weight\n\nSeal;10\n", "Name: Seal; Price, size, weight: 10"),
    ("id,name;alias\n1,Bob;Rob\n", "id: 1; name;alias: Bob;Rob"),
    ("id, a; b\n1, 2; 3\n", "id: 1; a; b: 2; 3"),
    ("id,a;b;c\n1,2\n", "id: 1; a;b;c: 2")])
def test_the_separator_gives_rows_as_many_fields_as_the_header(content, text):
    """A title with a comma made the comma the separator, and numbers were cut apart."""
    found = of("a.csv", content)
    assert found.text == text + "\n\n" and not found.remarks


@pytest.mark.parametrize("name, content, told", [
    ("a.csv", "text\nHello, world\nBye\n", "1 row has more fields than the header; the first is 2"),
    ("a.csv", "Title\n\na,b\n1,2\n", "2 rows have more fields than the header; the first is 3"),
    ("a.tsv", "a\n1\t2\n", "1 row has more fields than the header; the first is 2"),
    ("a.csv", "a,b,c\n1,2\n\n,,\n3\n", "2 rows have fewer fields than the header; the first is 2"),
    ("a.csv", "a,b,\n1,2\n", None), ("a.csv", "a,b\n1,2,\n", None)])
def test_rows_with_more_fields_than_the_header_are_told(name, content, told):
    """A comma in a text without quotes, or a title above the table."""
    assert of(name, content).remarks == (() if told is None else (told,))


def test_lines_of_jsonl_that_are_none_are_left_out_by_name():
    found = of("a.jsonl", '{"a": 1, "b": [2]}\n[1]\n{"a"\n' + "[" * 10**5 + '\n{"a": "b"}\n')
    assert found.text == "a: 1; b: [2]\n\na: b\n\n"
    assert found.remarks == ("3 lines are left out, which are no JSON objects; the first is 2",)
    alone = of("a.jsonl", '{"a": 1}\n[1]\n').remarks
    assert alone == ("line 2 is left out, which is no JSON object",)
    with pytest.raises(Unreadable, match="line 1"):
        of("a.jsonl", "[1]")


@pytest.mark.parametrize("value", [
    "12345678901234567890.123", "1.50", "1e400", "-0", "7" * 5000,
    '[1.50, {"b": 1e2, "b": [-0.0, {}], "ä\\"": "1.5"}, [], true, null]', "NaN"])
def test_numbers_of_jsonl_are_as_they_are_written(value):
    """They were rounded or infinite, and those of many digits made their object none."""
    found = of("a.jsonl", f'{{"a": {value}, "c": "d"}}\n')
    assert found.text == f"a: {value}; c: d\n\n" and not found.remarks


def test_all_values_of_one_name_in_jsonl_are_read():
    assert of("a.jsonl", '{"a": 1, "a": null, "a": "2"}').text == "a: 1; a: 2\n\n"


@pytest.mark.parametrize("end", ["\r", "\r\n"])
@pytest.mark.parametrize("name, lines", [
    ("a.jsonl", ['{"a": "1"}', '', '{"a": "2\u2028\x853"}']), ("a.csv", ["a", "1", "2\u2028\x853"]),
    ("a.tsv", ["a", "1", "2\u2028\x853"]), ("a.md", ["# One", "text", "## Two"])])
def test_lines_may_end_as_in_any_system(name, lines, end):
    found = of(name, codecs.BOM_UTF8 + end.join(lines).encode())
    assert not found.remarks and len(found.sections) == 2
    assert name == "a.md" or found.text == "a: 1\n\na: 2\u2028\x853\n\n"


def test_a_huge_field_and_a_huge_line_are_read():
    long, limit = "x " * 200_000, csv.field_size_limit()
    assert of("a.csv", f"a\n{long}").text.strip() == f"a: {long.strip()}"
    assert csv.field_size_limit() == limit, "which is that of the whole process"
    assert of("a.txt", long).text == long


def test_a_pdf_has_pages_and_its_title():
    found = of("a.pdf", pdf(["first page", "a sentence that be-\ngins here", "goes on."], "Name"))
    assert found.title == "Name" and len(found.pages) == 3 and found.remarks == ()
    assert found.text == "first page\na sentence that begins here\ngoes on.\n"
    place = found.text.index("here")
    assert found.pages_of(place, place + 10) == (2, 3) and found.pages_of(0, 5) == (1,)


def test_a_pdf_is_read_whose_title_is_damaged():
    found = of("a.pdf", pdf(["all of the text is here"], "\\376\\377\\330\\000\\000A"))
    assert (found.text, found.title) == ("all of the text is here\n", "")


@pytest.mark.parametrize("content, says", [
    (pdf(["x"], encrypted=True), "encrypted"), (pdf(["", ""]), "no text in any of its 2 pages"),
    (pdf([""]), "no text in its page: where it is scanned"),
    (b"%PDF-1.7 and nothing more", "damaged"), (b"", "damaged"),
    (pdf(["x"])[:200], "damaged")])
def test_a_pdf_without_text_is_refused_with_its_reason(content, says):
    with pytest.raises(Unreadable, match=says):
        of("a.pdf", content)


def test_pages_that_are_scanned_are_named():
    assert of("a.pdf", pdf(["x", "", "y", ""])).remarks == (
        "2 of 4 pages have no text (scanned?), the first is 2",)


def test_a_pdf_of_more_pages_than_are_read_is_refused(monkeypatch):
    monkeypatch.setattr(pdf_reader, "MOST_PAGES", 2)
    with pytest.raises(Unreadable, match="3 pages"):
        of("a.pdf", pdf(["x"] * 3))


def test_docx_has_headings_by_style_and_cells_of_tables():
    body = (paragraph("One & all", "Berschrift1") + paragraph("Some text.") + paragraph(" ")
            + f"<w:tbl><w:tr><w:tc>{paragraph('cell')}</w:tc></w:tr></w:tbl>"
            + paragraph("Two", "H2")
            + "<w:p><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t></w:r><w:del><w:r><w:t>gone</w:t></w:r>"
            "</w:del></w:p>")
    found = of("a.docx", docx(body, "The title"))
    assert found.title == "The title"
    assert found.text == "One & all\n\nSome text.\n\ncell\n\nTwo\n\na\tb\n\n"
    assert found.sections == ((0, ("One & all",)), (found.text.index("Two"), ("One & all", "Two")))
    assert of("a.docx", docx(body)).title == "One & all", "the first heading, where none is said"


@pytest.mark.parametrize("main, styles", [
    ("word/document2.xml", "styles2.xml"), ("/word/document2.xml", "/word/styles2.xml"),
    ("word/document2.xml", "../word/styles2.xml")])
def test_a_docx_whose_parts_have_other_names_is_read(main, styles):
    """As some programs write them: it was refused as no DOCX."""
    def relations(kind, target):
        return (f'<Relationships xmlns="urn:r"><Relationship Type="urn:r/other" Target="x"/>'
                f'<Relationship Type="urn:r/{kind}" Target="{target}"/></Relationships>')

    found = of("a.docx", zipped({
        "_rels/.rels": relations("officeDocument", main), "word/styles2.xml": STYLES,
        "word/_rels/document2.xml.rels": relations("styles", styles),
        "word/document2.xml": f'<w:document xmlns:w="{W}"><w:body>{paragraph("One", "H2")}'
                              f"{paragraph('text')}</w:body></w:document>"}))
    assert found.text == "One\n\ntext\n\n" and found.sections == ((0, ("One",)),)


def test_hidden_text_of_a_docx_is_not_read():
    """Nobody who opens the file sees it, so no answer may come from it."""
    def run(vanish, text):
        return f"<w:r><w:rPr>{vanish}</w:rPr><w:t>{text}</w:t></w:r>"

    body = "<w:p>" + run("", "seen") + run("<w:vanish/>", " unseen") + run(
        '<w:vanish w:val="false"/>', " shown") + run('<w:vanish w:val="1"/>', " away") + "</w:p>"
    assert of("a.docx", docx(body)).text == "seen shown\n\n"


def test_styles_of_a_docx_have_what_those_have_that_they_are_based_on():
    """Text that a style hides was read, and the sections of a company's own headings were none."""
    def style(name, based="", more=""):
        return (f'<w:style w:styleId="{name}"><w:name w:val="Own {name}"/>'
                f'<w:basedOn w:val="{based}"/>{more}</w:style>')

    def run(style, text, more=""):
        return f'<w:r><w:rPr><w:rStyle w:val="{style}"/>{more}</w:rPr><w:t>{text}</w:t></w:r>'

    own = (style("Late", "Corporate") + style("Corporate", "H2") + style("Round", "Round")
           + style("Body", "H2", '<w:pPr><w:outlineLvl w:val="9"/></w:pPr>')
           + style("Away", more="<w:rPr><w:vanish/></w:rPr>") + style("Gone", "Away")
           + style("Back", "Away", '<w:rPr><w:vanish w:val="0"/></w:rPr>'))
    body = (paragraph("One", "Late") + paragraph("text", "Body") + paragraph("round", "Round")
            + paragraph("unseen", "Gone") + paragraph("seen", "Back") + "<w:p>" + run("Away", "no")
            + run("Back", "yes") + run("Gone", "too", '<w:vanish w:val="false"/>') + "</w:p>"
            + f'<w:p><w:pPr><w:pStyle w:val="Gone"/></w:pPr>{run("Away", "twice")}</w:p>')
    found = of("a.docx", docx(body, **{"word/styles.xml": STYLES.replace("</w:styles>", "")
                                       + own + "</w:styles>"}))
    assert found.text.split() == ["One", "text", "round", "seen", "yestoo", "twice"]
    assert found.sections == ((0, ("One",)),)


def test_tabs_are_those_of_the_text_and_not_the_stops_of_the_paragraph():
    body = ('<w:p><w:pPr><w:tabs><w:tab w:val="left" w:pos="720"/></w:tabs></w:pPr>'
            "<w:r><w:t>a</w:t><w:ptab/><w:t>b</w:t></w:r></w:p>")
    assert of("a.docx", docx(body)).text == "a\tb\n\n"


def test_a_text_box_is_read_once():
    """Word keeps it twice, for old programs, and inside of another paragraph."""
    inner = f"<w:txbxContent>{paragraph('boxed')}</w:txbxContent>"
    mc = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
    body = (f"<w:p><w:r><w:t>outer</w:t><mc:AlternateContent {mc}><mc:Choice>{inner}</mc:Choice>"
            f"<mc:Fallback>{inner}</mc:Fallback></mc:AlternateContent></w:r></w:p>")
    assert of("a.docx", docx(body)).text.split() == ["outer", "boxed"]


RAISED = [
    ("10{6} m{2}", "10^6 m^2"), ("(a+b){n+1}", "(a+b)^n+1"), ("cm{-1}, 2{2n}", "cm^-1, 2^2n"),
    ("Ca{2+} and {14}C", "Ca^2+ and 14C"), ("1{st}, XX{e}, n{o}, Pump{TM}", "1st, XXe, no, PumpTM"),
    ("End.{3} Wort{[4]}", "End.3 Wort[4]"), ("{2}", "2"), ("water{1}", "water^1"),
    ("12345{12345}", "1234512345")]


@pytest.mark.parametrize("text, shown", RAISED)
def test_raised_numbers_are_no_digits_of_the_number_before_them(text, shown):
    """10 to the power of 6 was 106."""
    found = of("a.html", "<p>" + text.replace("{", "<sup>").replace("}", "</sup>"))
    assert found.text.strip() == shown
    begin, end = "<w:r><w:t xml:space='preserve'>", "</w:t></w:r>"
    raised = begin.replace("<w:t ", '<w:rPr><w:vertAlign w:val="superscript"/></w:rPr><w:t ')
    text = text.replace("{", end + raised).replace("}", end + begin)
    assert of("a.docx", docx(f"<w:p>{begin}{text}{end}</w:p>")).text.strip() == shown
    if "-1" in text:  # in two runs, as where the language of the text changes
        text = text.replace("-1", f"-{end}{raised}1")
        assert of("a.docx", docx(f"<w:p>{begin}{text}{end}</w:p>")).text.strip() == shown


def test_a_link_to_a_footnote_of_a_page_is_no_power():
    page = ('<h2>In 1998<sup id="r"><a href="#f">3</a></sup></h2>of H<sub>2</sub>O'
            '<sup hidden>2</sup> x<sup></sup>y, 500<a href="#fn4"><sup>4</sup></a> '
            'k<a href="/k"><sup>5</sup></a> <a href="#s">m<sup>6</sup></a>')
    found = of("a.html", page)
    assert found.text.split() == "In 1998[3] of H2O xy, 500[4] k^5 m^6".split()
    assert found.sections[0][1] == ("In 1998[3]",)
    for count, shown in ((7, "10^6"), (8, "106")):  # nodes beside the number
        assert of("a.html", f"<p>10<sup>6{'<b></b>' * count}</sup>").text.strip() == shown


@pytest.mark.parametrize("space", [
    "http://schemas.openxmlformats.org/officeDocument/2006/math",
    "http://purl.oclc.org/ooxml/officeDocument/math"])
def test_the_equations_of_a_docx_are_read(space):
    """They were left out: "the pressure is ." """
    def run(text):
        return f"<m:r><m:t>{text}</m:t></m:r>"

    part = (f"<m:f><m:num><m:d><m:e>{run('a')}</m:e></m:d></m:num><m:den>{run('2')}</m:den></m:f>"
            f"<m:sSubSup><m:e>{run('m')}</m:e><m:sub/><m:sup>{run('2')}</m:sup></m:sSubSup>"
            f"<m:f><m:num>{run('+3c')}{run('+d')}</m:num><m:den>{run('-2')}</m:den></m:f>"
            f"<m:sSup><m:e>{run('x')}</m:e><m:sup>{run('n+')}{run('1')}</m:sup></m:sSup>")
    body = (f'<w:p xmlns:m="{space}"><w:r><w:t>It is </w:t></w:r><m:oMath>{run("p=")}{part}'
            "</m:oMath><w:r><w:t> bar.</w:t></w:r></w:p>")
    assert of("a.docx", docx(body)).text == "It is p=(a)/2m^2(+3c+d)/-2x^(n+1) bar.\n\n"


def test_symbols_of_a_docx_are_characters():
    """Word inserts them by the numbers of their fonts: "5 m" was 5 micrometers."""
    def symbols(font, *numbers):
        return "".join(f'<w:r><w:sym w:font="{font}" w:char="{one}"/></w:r>' for one in numbers)

    shown = (symbols("Symbol", "F06D", "0061", "F0B3", "F0E5", "F0F2", "F07E", "F020", "F0A0")
             + symbols("Wingdings", "F0FC", "F0E0", "F0A8") + symbols("Arial", "00BD"))
    found = of("a.docx", docx(f"<w:p>{shown}</w:p>"))
    assert found.text == "μα≥∑∫∼ €✓→◻½\n\n" and not found.remarks
    wrong = symbols("Webdings", "F061") + symbols("Symbol", "F0FF", "x") + symbols("Arial", "D800")
    found = of("a.docx", docx(f"<w:p>{shown}{wrong}</w:p>"))
    assert found.text == "μα≥∑∫∼ €✓→◻½\n\n"
    assert found.remarks == ("4 symbols are left out; the first is 'F061' of the font 'Webdings'",)


def test_notes_of_a_docx_follow_the_paragraphs_that_refer_to_them():
    """They were left out, and nobody knew."""
    def note(kind, number, *texts):
        inside = "".join(map(paragraph, texts))
        return f'<w:{kind} w:id="{number}"><w:p><w:r><w:{kind}Ref/></w:r></w:p>{inside}</w:{kind}>'

    def part(kind, *notes):
        return f'<w:{kind}s xmlns:w="{W}">{"".join(notes)}</w:{kind}s>'

    def reference(kind, number, more=""):
        return f'<w:r><w:rPr>{more}</w:rPr><w:{kind}Reference w:id="{number}"/></w:r>'

    again = f"</w:p><w:p>{reference('footnote', 2)}</w:p></w:endnote>"
    body = ("<w:p><w:r><w:t>One</w:t></w:r>" + reference("footnote", 2)
            + reference("footnote", 3, "<w:vanish/>") + reference("footnote", 9)
            + "<w:r><w:t>, two.</w:t></w:r>" + reference("endnote", 2) + "</w:p>"
            + paragraph("Three."))
    found = of("a.docx", docx(body, **{
        "word/footnotes.xml": part("footnote", note("footnote", 0, "line"),
                                   note("footnote", 2, "Foot.", "More."),
                                   note("footnote", 3, "unseen")),
        "word/endnotes.xml": part("endnote", note("endnote", 2, "End.").replace(
            "</w:p></w:endnote>", again))}))
    assert found.text == "One, two.\n\nFoot.\n\nMore.\n\nEnd.\n\nThree.\n\n"
    assert not found.remarks
    chain = part("footnote", *(note("footnote", n, f"n{n}").replace(  # a hostile one
        "</w:footnote>", f"<w:p>{reference('footnote', n + 1)}</w:p></w:footnote>")
        for n in range(3000)))
    found = of("a.docx", docx(f"<w:p>{reference('footnote', 0)}</w:p>",
                              **{"word/footnotes.xml": chain}))
    assert found.text.split() == [f"n{n}" for n in range(3000)]


BOMB = f'<w:document xmlns:w="{W}"><w:body>' + "<w:p/>" * 30_000 + "</w:body></w:document>"
LAUGHS = ('<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]>' + BOMB)


@pytest.mark.parametrize("content, says", [
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "encrypted, or an old .doc"),
    (zipped({"word/document.xml": BOMB}), "zip bomb"),
    (zipped({"word/document.xml": LAUGHS[:900]}), "DOCTYPE"),
    (zipped({"word/document.xml": LAUGHS[:900].encode("utf-16")}), "DOCTYPE"),
    (zipped({"word/document.xml": "<a>"}), "damaged"), (zipped({"other": "x"}), "no DOCX"),
    (zipped({"word/document.xml": BOMB})[:-30], "damaged"), (b"", "damaged"),
    (docx("<w:p>" + "<w:x>" * 5000 + "</w:x>" * 5000 + "</w:p>"), "nested too deep")])
def test_a_docx_that_is_none_is_refused_with_its_reason(content, says, monkeypatch):
    monkeypatch.setattr(docx_reader, "LARGEST_PART", 100_000)
    with pytest.raises(Unreadable, match=says):
        of("a.docx", content)


def test_text_is_bounded_however_small_its_file(monkeypatch):
    monkeypatch.setattr(document, "MOST_TEXT", 1000)
    for name, content in (("a.docx", docx(paragraph("word " * 300))),
                          ("a.pdf", pdf(["\n".join(["word " * 15] * 20)])),
                          ("a.html", b"<p>" + b"word " * 300), ("a.csv", b"a\n" + b"word " * 300)):
        with pytest.raises(Unreadable, match="more than 1000 characters"):
            of(name, content)


def test_titles_and_headings_are_bounded_and_of_one_line():
    found = of("a.html", f"<title>{'t' * 9999}</title><h1>{'h' * 9999}</h1><h2>a\nb</h2>x")
    assert len(found.title) == len(found.sections[0][1][0]) == document.LONGEST_TITLE
    assert len(found.title_at(10**9, "")) == document.LONGEST_TITLE
    assert found.sections[1][1][1] == "a b"


def test_half_a_surrogate_pair_does_not_stop_anything():
    for name, content in (("a.jsonl", '{"a\\ud800": "\\udfff"}'), ("a.html", "<h1>&#xd800;x</h1>")):
        found = of(name, content)
        assert "".join([found.title, found.text, *found.sections[0][1]]).encode()


@pytest.mark.parametrize("name, library", [
    ("a.pdf", "pypdfium2"), ("a.html", "selectolax.lexbor"), ("a.md", "markdown_it")])
def test_a_library_that_is_missing_is_named(name, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(Unreadable, match=r"pip install 'rag_jax\[documents\]'"):
        of(name, b"x")


def test_random_damage_is_read_or_refused(tmp_path):
    """Another error than Unreadable would name no file. PDFs are read in a process of their own."""
    rng = random.Random(0)
    whole = {"a.docx": docx(paragraph("Some text") * 3), "a.html": b"<h1>One</h1><p>two" * 9,
             "a.md": b"# One\n\ntext\n" * 9, "a.csv": b'a,b\n1,"2"\n' * 9,
             "a.jsonl": b'{"a": "b"}\n' * 9, "a.txt": "é and more\n".encode() * 9}
    for name, content in whole.items():
        for _ in range(60):
            damaged = bytearray(content)
            for _ in range(rng.randint(1, 8)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            try:
                json.dumps(of(name, bytes(damaged[: rng.randint(1, len(damaged))])).record()
                           ).encode()
            except Unreadable:
                pass


def test_a_path_is_read_and_named(tmp_path):
    (tmp_path / "a.md").write_text("# One\ntext")
    assert read.read(tmp_path / "a.md").title == "One"
    (tmp_path / "a.xyz").write_text("x")
    with pytest.raises(Unreadable, match="a.xyz: files of this kind"):
        read.read(tmp_path / "a.xyz")
