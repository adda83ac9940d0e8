"""Small files in exactly the forms in which the paper's data are published, and what they mean."""

import bz2
import dataclasses
import gzip
import io
import json
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import pyarrow
from pyarrow import ipc, parquet

from rag_jax.data import task_files
from rag_jax.data.corpora import read_corpus
from rag_jax.data.question_files import Example, collect, read_jsonl, read_tsv
from rag_jax.retrieval.protocol import Passage

NQ_OPEN = [
    {"question": "when was the last time anyone was on the moon",
     "answer": ["14 December 1972 UTC", "December 1972"]},
    {"question": "who wrote he ain't heavy he's my brother lyrics",
     "answer": ["Bobby Scott", "Bob Russell"]},
    {"question": "where is café “olé”", "answer": ["Perú"]},
]
NQ_CSV = (
    "when was the last time anyone was on the moon\t['14 December 1972 UTC', 'December 1972']\n"
    "who wrote he ain't heavy\t['Bobby Scott', \"Bob O'Russell\"]\n"
    "where is café\t['Perú']\n"
)


def _context(number: int, **fields: Any) -> dict:
    return {"title": f"Title {number}", "text": f"Text é {number}.", "score": 13.5 + number,
            "title_score": 0, **fields}


BIENCODER = [
    {"dataset": "nq_train_psgs_w100", "question": "who sings does he love me",
     "answers": ["Linda Davis"],
     "positive_ctxs": [_context(1, passage_id="11828866"), _context(2, passage_id="11828867")],
     "negative_ctxs": [_context(3, passage_id="3")],
     "hard_negative_ctxs": [_context(4, passage_id="14525568"),
                            _context(1, passage_id="11828866")]},
    {"dataset": "nq_train_psgs_w100", "question": "how many pages", "answers": ["652", "six"],
     "positive_ctxs": [_context(5, psg_id="13457")], "negative_ctxs": [],
     "hard_negative_ctxs": []},
]
TRIVIA = {
    "Data": [
        {"Answer": {"Aliases": ["Sunset Blvd", "West Sunset Boulevard"],
                    "MatchedWikiEntityName": "Sunset Boulevard",
                    "NormalizedAliases": ["sunset blvd"], "NormalizedValue": "sunset boulevard",
                    "Type": "WikipediaEntity", "Value": "Sunset Boulevard"},
         "EntityPages": [{"DocSource": "TagMe", "Filename": "A.txt", "Title": "Andrew"}],
         "Question": "Which Lloyd Webber musical premiered in 1993?", "QuestionId": "tc_2",
         "QuestionSource": "http://www.triviacountry.com/", "SearchResults": []},
        {"Answer": {"Aliases": ["Campbell-Bannerman"], "NormalizedAliases": [],
                    "NormalizedValue": "x", "Type": "FreeForm", "Value": "Campbell-Bannerman"},
         "EntityPages": [], "Question": "Who was next PM after Balfour?", "QuestionId": "tc_3",
         "QuestionSource": "http://www.triviacountry.com/", "SearchResults": [{"Rank": 0}]},
    ],
    "Domain": "unfiltered-web", "Split": "train", "VerifiedEval": False, "Version": 1.0,
}
WEB = [
    {"url": "http://www.freebase.com/view/en/justin_bieber",
     "targetValue": '(list (description "Jazmyn Bieber") (description "Jaxon Bieber"))',
     "utterance": "what is the name of justin bieber brother?"},
    {"url": "http://www.freebase.com/view/en/natalie_portman",
     "targetValue": "(list (description Padmé))", "utterance": "what character did she play?"},
    {"url": "http://www.freebase.com/view/en/x",
     "targetValue": r'(list (description "\"Weird Al\" (singer)"))', "utterance": "who sang it?"},
]
CURATED = [
    {"question": "What is Francis Scott Key best known for?",
     "answer": [r"(The\s)?Star.?Spangled\s+Banner"]},
    {"question": "How hot is the sun?", "answer": [r"6,?[05]00\s*K|9,?941.*F"]},
]
MARCO = {
    "answers": {"0": ["Largest state"], "1": ["No Answer Present."], "2": ["It is 5."]},
    "passages": {"0": [{"is_selected": 1, "passage_text": "Some « text ».", "url": "http://x"}],
                 "1": [], "2": [{"is_selected": 0, "passage_text": "More.", "url": "http://y"}]},
    "query": {"0": "what is the largest state", "1": "unanswered", "2": "how much is café"},
    "query_id": {"0": 1185869, "1": 1185868, "2": 597651},
    "query_type": {"0": "DESCRIPTION", "1": "ENTITY", "2": "NUMERIC"},
    "wellFormedAnswers": {"0": ["Alaska is the largest state.", "The largest state is Alaska."],
                          "1": "[]", "2": ["A café is 5."]},
}


def clue(question: str, answer: str, snippets: int) -> dict:
    return {"show_number": "4680", "air_date": "2004-12-31", "category": "HISTORY",
            "round": "Jeopardy!", "value": "$200", "question": question, "answer": answer,
            "search_results": [{"url": "u", "title": "t", "snippet": "s", "related_links": None}
                               for _ in range(snippets)]}


CLUES = {
    "000000.json": clue("'For the last 8 years of his life, <i>Galileo</i> was here'",
                        "Copernicus", 41),
    "000001.json": clue("Few snippets", "Nobody", 40),
    "000007.json": clue("In 1963, live on \"The Art Linkletter Show\", this company &amp; co",
                        "McDonald\\'s", 50),
}
FEVER = [
    {"id": 75397, "verifiable": "VERIFIABLE", "label": "SUPPORTS",
     "claim": "Nikolaj Coster-Waldau worked with the Fox Broadcasting Company.",
     "evidence": [[[92206, 104971, "Nikolaj_Coster-Waldau", 7],
                   [92206, 104971, "Gladiator_-LRB-2000_film-RRB-", 0]],
                  [[92207, 104972, "Nikolaj_Coster-Waldau", 2]]]},
    {"id": 33078, "verifiable": "VERIFIABLE", "label": "REFUTES", "claim": "It is not so.",
     "evidence": [[[1, 2, "Star_Trek-COLON-_Generations", 0]]]},
    {"id": 137637, "verifiable": "NOT VERIFIABLE", "label": "NOT ENOUGH INFO",
     "claim": "Henri Christophe built a palace in Milot.",
     "evidence": [[[166934, None, None, None]]]},
]
KILT = [
    {"id": "6915606477668963399", "input": "what do the 3 dots mean in math",
     "output": [
         {"answer": "the therefore sign",
          "provenance": [{"wikipedia_id": "10593264", "title": "Therefore sign",
                          "section": "Section::::Abstract.", "start_paragraph_id": 1,
                          "start_character": 0, "end_paragraph_id": 1, "end_character": 7,
                          "bleu_score": 1.0, "meta": {}}]},
         {"answer": "therefore sign"},
         {"provenance": [{"wikipedia_id": "10593264", "title": "Therefore sign"}]}],
     "meta": {}},
    {"id": "2", "input": "who?", "output": [{"answer": "He", "meta": {"score": 3}}], "meta": {}},
]
ARTICLES = [
    {"id": "12", "url": "https://en.wikipedia.org/wiki?curid=12", "title": "Anarchism",
     "text": "Anarchism\n\nAnarchism is a « political » philosophy.\nIt is old."},
    {"id": "39", "url": "https://en.wikipedia.org/wiki?curid=39", "title": "Albedo",
     "text": "Albedo\n\nAlbedo is the measure."},
    {"id": "40", "url": "https://en.wikipedia.org/wiki?curid=40", "title": "Moved", "text": ""},
]
DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" version="0.10" xml:lang="en">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="1" case="first-letter">Talk</namespace>
    </namespaces>
  </siteinfo>
  <page>
    <title>AccessibleComputing</title>
    <ns>0</ns>
    <id>10</id>
    <redirect title="Computer accessibility" />
    <revision>
      <id>854851586</id>
      <contributor><username>Godsy</username><id>23257138</id></contributor>
      <text xml:space="preserve">#REDIRECT [[Computer accessibility]]</text>
    </revision>
  </page>
  <page>
    <title>Anarchism</title>
    <ns>0</ns>
    <id>12</id>
    <revision>
      <id>873851587</id>
      <text bytes="9" xml:space="preserve">{{Infobox|a={{b}}}}
'''Anarchism''' is an [[anti-authoritarian|anti-authority]] [[philosophy]]&lt;ref&gt;A&lt;/ref&gt; &amp; more.
== Étymologie ==
* a list</text>
      <sha1>x</sha1>
    </revision>
  </page>
  <page>
    <title>Mercury</title>
    <ns>0</ns>
    <id>19694</id>
    <revision><id>1</id><text>'''Mercury''' may be: {{disambiguation|geo}}</text></revision>
  </page>
  <page>
    <title>Talk:Anarchism</title>
    <ns>1</ns>
    <id>51</id>
    <revision><id>2</id><text>Talk.</text></revision>
  </page>
  <page>
    <title>Albedo &amp; light</title>
    <ns>0</ns>
    <id>39</id>
    <revision><id>3</id><text>Albedo is the measure.</text></revision>
  </page>
</mediawiki>
"""  # noqa: E501 (as published)
PSGS = ('id\ttext\ttitle\n1\t"Aaron Aaron ( or ; ""Ahärôn"") is a prophet"\tAaron\n'
        "2\tGod at Sinai granted Aaron the priesthood\tAaron\n3\tAlbedo.\t\n")
PASSAGES = [{"id": "1", "title": "Aaron", "text": "A « prophet »."}, {"id": 2, "text": "Sinai."}]
ROWS = {"id": ["1", "2", "3"], "text": ["Aaron is é.", "God at Sinai", "Albedo."],
        "title": ["Aaron", "Aaron", "Albedo"], "embeddings": [[0.5] * 4, [0.1] * 4, [0.2] * 4]}


def lines(records: list[dict]) -> bytes:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()


def document(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=4).encode()


def compact(value: Any) -> bytes:
    return json.dumps(value).encode()


def zipped(clues: dict[str, dict]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train/", "")
        archive.writestr("__MACOSX/train/._000000.json", b"\0")
        for name, record in clues.items():
            archive.writestr(f"train/{name}", json.dumps(record))
    return out.getvalue()


def to_parquet(columns: dict) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), out, row_group_size=2)
    return out.getvalue()


def to_arrow(columns: dict) -> bytes:
    out = io.BytesIO()
    table = pyarrow.table(columns)
    with ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return out.getvalue()


@dataclasses.dataclass(frozen=True)
class Format:
    """A form of file.

    Attributes:
      name: of a file of it.
      content: of the sample, as Python's JSON types where it is made of JSON, else as text.
      write: content to bytes.
      read: path to examples or passages.
      meaning: of the sample.
      needed: the keys of its JSON without which a record is worthless.
      may_be_empty: those of them that may hold nothing.
    """

    name: str
    content: Any
    write: Callable[[Any], bytes]
    read: Callable[[str], list]
    meaning: list
    needed: frozenset[str] = frozenset()
    may_be_empty: frozenset[str] = frozenset()


def _questions(reader: Callable) -> Callable[[str], list[Example]]:
    return lambda path: collect(path, reader(path))


def _passages(path: str) -> list[Passage]:
    return list(read_corpus(path))


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FEVER3 = [
    Example("75397", FEVER[0]["claim"], ("SUPPORTS",),
            titles=("Nikolaj Coster-Waldau", "Gladiator (2000 film)")),
    Example("33078", "It is not so.", ("REFUTES",), titles=("Star Trek: Generations",)),
    Example("137637", FEVER[2]["claim"], ("NOT ENOUGH INFO",)),
]
_WIKI = [Passage("12", "Anarchism", "Anarchism is an anti-authority philosophy & more."),
         Passage("39", "Albedo & light", "Albedo is the measure.")]
_TABLE = [Passage(*row) for row in zip(ROWS["id"], ROWS["title"], ROWS["text"], strict=True)]
_AARON = [Passage("1", "Aaron", 'Aaron Aaron ( or ; "Ahärôn") is a prophet'),
          Passage("2", "Aaron", "God at Sinai granted Aaron the priesthood"),
          Passage("3", "", "Albedo.")]

FORMATS = [
    Format("NQ-open.train.jsonl", NQ_OPEN, lines, _questions(read_jsonl),
           [Example(str(n), r["question"], tuple(r["answer"])) for n, r in enumerate(NQ_OPEN, 1)],
           _keys("question answer")),
    Format("own.jsonl.gz", NQ_OPEN, lambda c: gzip.compress(lines(c), mtime=0),
           _questions(read_jsonl),
           [Example(str(n), r["question"], tuple(r["answer"])) for n, r in enumerate(NQ_OPEN, 1)],
           _keys("question answer")),
    Format("nq-test.qa.csv", NQ_CSV, str.encode, _questions(read_tsv),
           [Example("1", NQ_OPEN[0]["question"], tuple(NQ_OPEN[0]["answer"])),
            Example("2", "who wrote he ain't heavy", ("Bobby Scott", "Bob O'Russell")),
            Example("3", "where is café", ("Perú",))]),
    Format("biencoder-nq-train.json", BIENCODER, document, _questions(task_files.read_dpr_json),
           [Example("1", "who sings does he love me", ("Linda Davis",),
                    ("11828866", "11828867"), ("14525568",), titles=("Title 1", "Title 2")),
            Example("2", "how many pages", ("652", "six"), ("13457",), titles=("Title 5",))],
           _keys("question answers positive_ctxs hard_negative_ctxs title passage_id psg_id"),
           _keys("positive_ctxs hard_negative_ctxs title")),
    Format("unfiltered-web-train.json", TRIVIA, document, _questions(task_files.read_trivia_qa),
           [Example("tc_2", TRIVIA["Data"][0]["Question"],
                    ("Sunset Boulevard", "Sunset Blvd", "West Sunset Boulevard")),
            Example("tc_3", TRIVIA["Data"][1]["Question"], ("Campbell-Bannerman",))],
           _keys("Data Question QuestionId Answer Value Aliases"), _keys("Aliases")),
    Format("webquestions.examples.train.json", WEB, compact,
           _questions(task_files.read_web_questions),
           [Example("1", WEB[0]["utterance"], ("Jazmyn Bieber", "Jaxon Bieber")),
            Example("2", WEB[1]["utterance"], ("Padmé",)),
            Example("3", WEB[2]["utterance"], ('"Weird Al" (singer)',))],
           _keys("utterance targetValue")),
    Format("CuratedTrec-train.txt", CURATED, lines, _questions(task_files.read_regex_jsonl),
           [Example(str(n), r["question"], tuple(r["answer"]), regex=True)
            for n, r in enumerate(CURATED, 1)], _keys("question answer")),
    Format("train_v2.1.json.gz", MARCO, lambda c: gzip.compress(compact(c), mtime=0),
           _questions(task_files.read_ms_marco),
           [Example("1185869", MARCO["query"]["0"], tuple(MARCO["wellFormedAnswers"]["0"])),
            Example("597651", MARCO["query"]["2"], ("A café is 5.",))],
           _keys("query query_id wellFormedAnswers 0 1 2"), _keys("0 1 2")),
    Format("dev_v2.1.json", MARCO, compact, _questions(task_files.read_ms_marco),
           [Example("1185869", MARCO["query"]["0"], tuple(MARCO["wellFormedAnswers"]["0"])),
            Example("597651", MARCO["query"]["2"], ("A café is 5.",))],
           _keys("query query_id wellFormedAnswers 0 1 2"), _keys("0 1 2")),
    Format("train.zip", CLUES, zipped, _questions(task_files.read_search_qa),
           [Example("000000", "Copernicus",
                    ("For the last 8 years of his life, Galileo was here",)),
            Example("000007", "McDonald's",
                    ('In 1963, live on "The Art Linkletter Show", this company & co',))],
           _keys("question answer search_results 000000.json 000001.json 000007.json"),
           _keys("search_results")),
    Format("train.jsonl", FEVER, lines, _questions(task_files.read_fever), _FEVER3,
           _keys("id label claim evidence")),
    Format("paper_dev.jsonl", FEVER, lines, _questions(task_files.read_fever2), _FEVER3[:2],
           _keys("id label claim evidence")),
    Format("nq-dev-kilt.jsonl", KILT, lines, _questions(task_files.read_kilt),
           [Example("6915606477668963399", KILT[0]["input"],
                    ("the therefore sign", "therefore sign"), titles=("Therefore sign",),
                    evidence=("10593264\tTherefore sign",)),
            Example("2", "who?", ("He",))],
           _keys("id input output answer provenance wikipedia_id title"),
           _keys("provenance title answer")),
    Format("psgs_w100.tsv", PSGS, str.encode, _passages, _AARON),
    Format("psgs_w100.tsv.gz", PSGS, lambda c: gzip.compress(c.encode(), mtime=0), _passages,
           _AARON),
    Format("passages.jsonl", PASSAGES, lines, _passages,
           [Passage("1", "Aaron", "A « prophet »."), Passage("2", "", "Sinai.")],
           _keys("id text")),
    Format("AA/wiki_00", ARTICLES, lines, lambda path: _passages(pathlib.Path(path).parents[1]),
           [Passage("12", "Anarchism", "Anarchism is a « political » philosophy. It is old."),
            Passage("39", "Albedo", "Albedo is the measure.")],
           _keys("id title text"), _keys("text title")),
    Format("enwiki-pages-articles.xml", DUMP, str.encode, _passages, _WIKI),
    Format("enwiki-pages-articles.xml.bz2", DUMP, lambda c: bz2.compress(c.encode()), _passages,
           _WIKI),
    Format("train-00000-of-00157.parquet", ROWS, to_parquet, _passages, _TABLE),
    Format("data-00000-of-00080.arrow", ROWS, to_arrow, _passages, _TABLE),
]
