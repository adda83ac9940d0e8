"""Wikipedia's markup: the prose stays, word for word, and nothing of the markup does."""

import pytest

from rag_jax.data.wikitext import is_disambiguation, plain_text


@pytest.mark.parametrize("markup, text", [
    ("'''Lima''' is the ''capital'' of [[Peru]].", "Lima is the capital of Peru."),
    ("[[Republic of Peru|Peru]]vian [[:Category:X|x]] [[a|b|c]]", "Peruvian x c"),
    ("A{{Infobox|a={{b|{{c}}}}\n|d}}B", "AB"),
    ("A {{math|{x}}} {{a|{{b|{x}}}}} {{c|}d{}}.", "A ."),
    ("x<ref>no</ref> y<ref name=\"a\" /> z<ref name=b>no [[no]]</ref>.", "x y z."),
    ("before <!-- no\nno --> after <!-- no\nno", "before after"),
    ("A\n{| class=x\n|-\n| no\n{|\n| no\n|}\n|}\nB", "A B"),
    ("== History ==\nText.\n=== More ===\n* no\n# no\n; no\n: no\n----\nEnd.", "Text. End."),
    ("[[File:a.jpg|thumb|with [[a link]] and [more] in it]]Text [[Category:X]]", "Text"),
    ("== Heading == \nText [sic] [[a [b] c]].", "Text [sic] a [b] c."),
    ("see [https://x.org/a the page] and [https://y.org]", "see the page and"),
    ("see [//x.org the [first] page] [//y.org and [[Lima]] [//z.org",
     "see the [first] page [//y.org and Lima [//z.org"),
    ("x <ref>y <math>no</math> z <REF name=a>no</Ref > <ref/> w </pre>", "x w"),
    ("x <ref>y <math>no</math> <pre>z", "x y z"),
    ("Tom &amp; Jerry&nbsp;&lt;3 <br/> <span class='x'>in</span> H<sub>2</sub>O",
     "Tom & Jerry <3 in H2O"),
    ("Lima<br>Peru<br />Inca<BR clear=all>x</br>y<b>z</b>", "Lima Peru Inca x yz"),
    ("Lima ({{lang|es|x}}; {{IPA|y}}) is", "Lima is"),
    ("__NOTOC__ Text", "Text"),
    ("<math>a < b</math> and <gallery>\nno\n</gallery>end", "and end"),
    ("", ""),
    ("{{unclosed and [[unclosed", "{{unclosed and [[unclosed"),
])
def test_prose(markup, text):
    assert plain_text(markup) == text


@pytest.mark.parametrize("line", ["=", "= ", "<!--"])
def test_a_line_of_what_only_begins_takes_no_longer_than_others(line):
    """3,000 signs of a heading that did not end took minutes."""
    prose = plain_text(line * 20_000 + "Lima")
    assert prose == ("" if line == "<!--" else (line * 20_000 + "Lima"))


def test_tags_and_links_that_nothing_ends_take_no_longer_than_others():
    """60,000 took minutes, as each was looked for to the end of the page, and links in all ways."""
    assert plain_text("<ref>" * 60_000 + "Lima") == "Lima"
    assert plain_text("[//a " * 60_000 + "Lima").endswith("Lima")
    assert plain_text("[//" + "a" * 100_000).endswith("a")


def test_deep_and_broken_nesting_ends(markup="{{" * 100 + "x" + "}}" * 100):
    assert plain_text(markup + "[[" * 100 + "y" + "]]" * 99) == "[[y"


@pytest.mark.parametrize("begin, end", [("[[", "]]"), ("{{", "}}"), ("{|\n", "|}\n"), ("( ", "")])
def test_what_nests_without_end_takes_no_longer_than_other_pages(begin, end, deep=60_000):
    """A page of 240 KB took an hour, as each level was looked for in all of it; so did blanks."""
    markup = begin * deep + "\na\n" + end * deep + "\n(" + " " * 4 * deep
    assert plain_text(f"Lima.\n{markup}\nPeru.").startswith("Lima.")


@pytest.mark.parametrize("title, markup, is_one", [
    ("Mercury", "'''Mercury''' may be:\n{{disambiguation|geo}}", True),
    ("Mercury", "x {{ Disambig }}", True),
    ("Mercury", "x {{hndis|Mercury}}", True),
    ("Mercury (disambiguation)", "x", True),
    ("Mercury", "{{disambiguation needed}} {{distinguish|x}} disambiguation", False),
])
def test_pages_that_list_the_meanings_of_a_name(title, markup, is_one):
    assert is_disambiguation(title, markup) is is_one
