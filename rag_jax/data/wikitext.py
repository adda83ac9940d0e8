"""Plain text of Wikipedia's markup: what a reader would call the prose of an article.

Modest on purpose: templates (infoboxes among them), tables, lists, headings, references, files and
categories are dropped, as DPR did with DrQA's tools; links keep their text. A template that makes
part of a sentence, such as a conversion of units, is lost with the rest. A parser of the whole
grammar (mwparserfromhell) would be one more dependency for what is thrown away in any case.
"""

import html
import re

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)  # one without an end hides all the rest
_DROPPED = re.compile(
    r"<(ref|math|chem|gallery|timeline|score|syntaxhighlight|source|imagemap|table|nowiki|pre)\b"
    r"[^<>]*>", re.IGNORECASE)
_BREAK = re.compile(r"</?br\b[^<>]*>", re.IGNORECASE)  # </br> is a common slip
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
# A template without another inside; single braces may be inside.
_TEMPLATE = re.compile(r"\{\{(?!\{)(?:[^{}]|\{(?!\{)|\}(?!\})|\}(?=\}\}(?!\})))*\}\}")
_TABLE = re.compile(r"^[ :]*\{\|(?:(?!^[ :]*\{\|).)*?^[ :]*\|\}", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[\[((?:[^\[\]]|\[(?!\[)|\](?!\]))*)\]\]")
_URL = re.compile(r"\[(?:https?:|ftp:|mailto:)?//[^\s\[\]]*+\s*+"
                  r"((?:[^\[\]]++|\[[^\[\]]*+\])*+)\]")
_QUOTES = re.compile(r"'{2,5}")
_MAGIC = re.compile(r"__[A-Z]+__")
_BLOCK = re.compile(r"^(?:=.*=[ \t]*|[*#;:|!].*|-{4,}.*|\{\|.*|\|\}.*)$", re.MULTILINE)
_BRACKETS = re.compile(r"\( ?[,;]* ?\)")  # where white space is one space
_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:disambig\w*|dab|hndis|geodis|schooldis|hospitaldis|mathdab|roaddis|numberdis"
    r"|letter-number combination disambiguation|human name disambiguation|airport disambiguation)"
    r"\s*[|}]", re.IGNORECASE)
_DEEPEST = 100  # as MediaWiki nests templates; thousands, in a hostile page, would take hours
_UNSEEN = ("file:", "image:", "category:", "media:")


def is_disambiguation(title: str, markup: str) -> bool:
    """Whether a page lists the pages of one name."""
    return title.endswith("(disambiguation)") or bool(_DISAMBIGUATION.search(markup))


def plain_text(markup: str) -> str:
    """The prose of an article in one line."""
    text = _COMMENT.sub("", markup)
    text = _without_dropped(text)
    text = _inside_out(_TEMPLATE, "", text)
    text = _inside_out(_TABLE, "", text)
    text = _inside_out(_LINK, lambda match: _link_text(match[1]), text)
    text = _URL.sub(r"\1", text)
    text = _BLOCK.sub("", _MAGIC.sub("", _QUOTES.sub("", text)))
    text = html.unescape(without_tags(text))
    text = _BRACKETS.sub("", " ".join(text.split()))
    return " ".join(text.split()).replace(" ,", ",")


def without_tags(text: str) -> str:
    """The text without its tags; a line break is a space, for the words beside it are two."""
    return _TAG.sub("", _BREAK.sub(" ", text))


def _without_dropped(text: str) -> str:
    """The text without elements that are dropped; a tag that nothing ends drops nothing."""
    kept, end, endless = [], 0, set()
    for tag in _DROPPED.finditer(text):
        name = tag[1].lower()
        if tag.start() < end or name in endless:
            continue
        last = tag
        if not tag[0].endswith("/>"):
            last = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(text, tag.end())
        if last is None:
            endless.add(name)  # it is not looked for again, so that many take no longer than one
            continue
        kept.append(text[end:tag.start()])
        end = last.end()
    return "".join([*kept, text[end:]])


def _inside_out(pattern: re.Pattern, replacement, text: str) -> str:
    """Replaces the innermost matches, and those around them, until there are none or `_DEEPEST`."""
    for _ in range(_DEEPEST):
        text, count = pattern.subn(replacement, text)
        if not count:
            break
    return text


def _link_text(inside: str) -> str:
    target, _, shown = inside.partition("|")
    if target.strip().lower().startswith(_UNSEEN):
        return ""
    return shown.rpartition("|")[2] or target.lstrip(":")
