"""Readers of the official files of the paper's tasks, one a format.

Each yields (place of an example for errors, example), unchecked, in the file's order, and reads
piece by piece. `tasks.toml` says which file has which format; those of files without answers take
`hidden`.

Raises (all readers):
    DataError: names the file, the line or record, and the field that is missing or wrong.
"""

import html
import itertools
import json
import lzma
import re
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Iterator

from rag_jax.data.json_document import json_array, json_columns
from rag_jax.data.question_files import Example, read_jsonl, read_tsv
from rag_jax.data.records import Record, json_lines
from rag_jax.data.wikitext import without_tags
from rag_jax.errors import DataError

Rows = Iterator[tuple[str, Example]]

FEVER_LABELS = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")
_PTB = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}",
        "-COLON-": ":"}
_DESCRIPTION = r'\(description (?:"((?:[^"\\]|\\.)+)"|([^()"]+))\)'
_TARGETS = re.compile(rf"\(list(?: {_DESCRIPTION})+\)")
_ESCAPED = re.compile(r"\\(['\"])")  # as J! Archive's pages have it
_FEWEST_SNIPPETS = 41
LARGEST_MEMBER = 2**26  # bytes of a clue in SearchQA's zip files


def _unique(texts: Iterable[str]) -> tuple[str, ...]:
    """Each text once, in order, blank ones left out."""
    return tuple(dict.fromkeys(text for text in texts if text))


def read_regex_jsonl(path: str) -> Rows:
    """CuratedTREC as DrQA publishes it: {"question", "answer": [regular expression]} a line."""
    for where, example in read_jsonl(path):
        yield where, example._replace(regex=True)


def read_dpr_json(path: str) -> Rows:
    """DPR's biencoder-*.json: an array of {"question", "answers", "positive_ctxs": [{"title",
    "text", "passage_id"}], "hard_negative_ctxs": [...]}.

    "psg_id" stands for "passage_id" in the files of TriviaQA. A passage that is listed as positive
    too is no negative. The random "negative_ctxs" are skipped: batches draw other negatives.
    """
    for number, record in json_array(path):
        ids, titles = _passages(record, "positive_ctxs")
        negatives, _ = _passages(record, "hard_negative_ctxs")
        yield record.where, Example(
            id=str(number),
            question=record.text("question"),
            answers=_unique(record.texts("answers")),
            positive_ids=ids,
            negative_ids=tuple(i for i in negatives if i not in ids),
            titles=titles,
        )


def _passages(record: Record, key: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ids and the titles of a list of passages."""
    passages = record.records(key)
    return (_unique(p.name("psg_id" if p.has("psg_id") else "passage_id") for p in passages),
            _unique(p.text("title", blank=True) for p in passages))


def read_trivia_qa(path: str, hidden: bool = False) -> Rows:
    """TriviaQA's JSON: {"Data": [{"Question", "QuestionId", "Answer": {"Value", "Aliases", ...}}]}.

    The answers are the value, its aliases, and those of annotators ("HumanAnswers"), as they are
    written. The test files "-without-answers.json" have none (`hidden`).
    """
    for _, record in json_array(path, "Data"):
        texts = []
        if not hidden:
            answer = record.record("Answer")
            human = answer.texts("HumanAnswers") if answer.has("HumanAnswers") else ()
            texts = [answer.text("Value"), *answer.texts("Aliases"), *human]
        yield record.where, Example(record.name("QuestionId"), record.text("Question"),
                                    _unique(texts))


def read_web_questions(path: str) -> Rows:
    """WebQuestions' JSON: an array of {"url", "utterance", "targetValue"}, where the last is
    (list (description Peru) (description "Ivory Coast")).
    """
    for number, record in json_array(path):
        target = record.text("targetValue")
        if not _TARGETS.fullmatch(target):
            raise record.error("targetValue", '(list (description ...) (description "..."))')
        descriptions = re.findall(_DESCRIPTION, target)
        answers = [re.sub(r"\\(.)", r"\1", quoted) if quoted else plain
                   for quoted, plain in descriptions]
        yield record.where, Example(str(number), record.text("utterance"),
                                    _unique(text.strip() for text in answers))


def read_ms_marco(path: str, hidden: bool = False) -> Rows:
    """MS-MARCO v2.1: {"query": {"0": ...}, "query_id": {...}, "wellFormedAnswers": {...}, ...}.

    The task of natural language generation (NLG): questions whose "wellFormedAnswers" is not "[]"
    or blank, with those answers. The passages are skipped, as in the paper. The eval file has no
    answers (`hidden`).
    """
    names = ("query", "query_id") if hidden else ("query", "query_id", "wellFormedAnswers")
    columns = json_columns(path, names)
    for row in columns["query" if hidden else "wellFormedAnswers"]:
        record = Record(f"{path}: record {row}", {name: columns[name][row] for name in names})
        none = hidden or record.fields["wellFormedAnswers"] == "[]"
        texts = () if none else _unique(record.texts("wellFormedAnswers"))
        question, identity = record.text("query"), record.name("query_id")
        if texts or hidden:
            yield record.where, Example(identity, question, texts)


def read_search_qa(path: str) -> Rows:
    """SearchQA's train.zip, val.zip, test.zip: a JSON file a clue, with "question" (Jeopardy's
    clue), "answer" and "search_results".

    For the generation of clues the answer, an entity, is the input and the clue is the output.
    Clues with 40 or fewer search results are left out, as in SearchQA. Marks of the web page are
    taken off: tags, entities, backslashes before quotation marks (McDonald\\'s) and the quotation
    marks around a whole clue.
    """
    number = 0
    for number, (name, data) in enumerate(_members(path), 1):
        where = f"{path}: record {number} ({name})"
        try:
            record = Record(where, json.loads(data))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error}): fetch the file again") from None
        clue, answer = _plain(record.text("question")), _plain(record.text("answer"))
        if len(record.records("search_results")) >= _FEWEST_SNIPPETS:
            identity = name.rsplit("/", 1)[-1].removesuffix(".json")
            yield where, Example(identity, answer, (clue,))


def _members(path: str) -> Iterator[tuple[str, bytes]]:
    """Yields (name, content) of the files of a zip archive, by name."""
    number, name = 0, "the list of its files"
    try:
        with zipfile.ZipFile(path) as archive:
            files = [f for f in archive.namelist() if not f.startswith("__MACOSX")]
            for name in sorted(f for f in files if not f.endswith("/")):
                number += 1
                with archive.open(name) as file:
                    content = file.read(LARGEST_MEMBER + 1)
                if len(content) > LARGEST_MEMBER:
                    raise DataError(f"{path}: record {number} ({name}): unpacks to more than "
                                    f"{LARGEST_MEMBER} bytes, as zip bombs do")
                yield name, content
    except (FileNotFoundError, DataError):
        raise
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError,
            RuntimeError, OSError, ValueError, OverflowError, struct.error) as error:
        raise DataError(f"{path}: record {number} ({name}): damaged zip file ({error}): fetch it "
                         "again") from None


def _plain(text: str) -> str:
    text = " ".join(_ESCAPED.sub(r"\1", html.unescape(without_tags(text))).split())
    enclosed = len(text) > 1 and text[0] == text[-1] == "'"
    return text[1:-1].strip() if enclosed else text


def read_fever(path: str) -> Rows:
    """FEVER's JSONL: {"id", "label", "claim", "evidence": [[[annotation, evidence, page, line]]]}.

    The answer is the label; the titles are the pages of all evidence, written as Wikipedia does.
    """
    for _, record in json_lines(path):
        label = record.text("label")
        if label not in FEVER_LABELS:
            raise record.error("label", f"one of {', '.join(FEVER_LABELS)}")
        pages = _unique(_evidence_pages(record))
        if bool(pages) != (label != "NOT ENOUGH INFO"):
            raise record.error("evidence", f"{'pages' if not pages else 'no page'} for {label}")
        yield record.where, Example(record.name("id"), record.text("claim"), (label,),
                                    titles=pages)


def _evidence_pages(record: Record) -> Iterator[str]:
    bad = record.error("evidence", "sets of [annotation id, evidence id, page or null, sentence]")
    sets = record.fields.get("evidence")
    if not isinstance(sets, list) or not sets or not all(
            isinstance(s, list) and s for s in sets):
        raise bad
    for item in itertools.chain(*sets):
        if not isinstance(item, list) or len(item) != 4 or not isinstance(item[2], str | None):
            raise bad
        if item[2] is not None:
            yield fever_title(item[2])


def fever_title(page: str) -> str:
    """A page's title from FEVER's name of it: Gladiator_-LRB-2000_film-RRB-."""
    for coded, plain in _PTB.items():
        page = page.replace(coded, plain)
    return unicodedata.normalize("NFC", page.replace("_", " ")).strip()


def read_fever2(path: str) -> Rows:
    """FEVER without the claims that lack evidence either way: SUPPORTS or REFUTES."""
    for where, example in read_fever(path):
        if example.answers != ("NOT ENOUGH INFO",):
            yield where, example


def read_kilt(path: str, hidden: bool = False) -> Rows:
    """KILT's JSONL: {"id", "input", "output": [{"answer", "provenance": [{"title",
    "wikipedia_id"}]}]}; an output may have either or both. A blank answer counts as none, as for
    KILT's own scorer: Hugging Face's copy has one wherever there is none. The test files have no
    "output" (`hidden`).
    """
    for _, record in json_lines(path):
        outputs = record.records("output") if record.has("output") or not hidden else []
        for output in outputs:
            if not output.fields or output.fields.keys() - {"answer", "provenance", "meta"}:
                raise DataError(f"{output.where}: keys {', '.join(output.fields) or 'none'}: "
                                 "expected answer, provenance, meta")
        sets = [o.records("provenance") for o in outputs if o.has("provenance")]
        pages = [[(p.name("wikipedia_id"), " ".join(p.text("title", blank=True).split()))
                  for p in s] for s in sets]
        yield record.where, Example(
            id=record.name("id"),
            question=record.text("input"),
            answers=_unique(o.text("answer", blank=True) for o in outputs if o.has("answer")),
            titles=_unique(title for each in pages for _, title in each),
            evidence=_unique("\n".join(dict.fromkeys(f"{i}\t{title}" for i, title in each))
                             for each in pages),
        )


READERS = {
    "jsonl": read_jsonl, "tsv": read_tsv, "regex_jsonl": read_regex_jsonl,
    "dpr_json": read_dpr_json, "web_questions": read_web_questions,
    "trivia_qa": read_trivia_qa, "ms_marco": read_ms_marco, "search_qa": read_search_qa,
    "fever": read_fever, "fever2": read_fever2,
}
