"""BM25, the lexical retriever of the paper's ablation (table 6), by the bm25s library.

Lucene's BM25 (k1 0.9, b 0.4, as DPR's baseline) over title and text, with Snowball's stems and
without stop words; Chinese and Japanese count by characters and pairs of them, as in Lucene's CJK
analyzers. An index records how its words were counted, and those of questions are counted alike.
For its directory see manifest.py; bm25s's files are in bm25/.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import re
import sys
import tokenize
import types
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rag_jax.config import RetrievalConfig
from rag_jax.retrieval.manifest import IndexFolder, open_folder
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import (
    LARGEST,
    Index,
    RetrievalError,
    SearchResult,
    check_texts,
)
from rag_jax.retrieval.publish import begin_version, claimed, copy_store, publish_index
from rag_jax.retrieval.versions import AGAIN, opened
from rag_jax.visible import is_terminal

METHOD = "lucene"
LARGEST_K1 = 1e6  # with a larger one, scores are proportional to the number of occurrences
# Settings of which an index from before they existed says nothing: they are off there.
FLAGS = ("parts_cjk", "keeps_marks", "drops_hidden", "parts_ligatures", "keeps_single")
LANGUAGES = ("english", "danish", "dutch", "french", "german", "italian", "norwegian", "portuguese",
             "russian", "spanish", "swedish", "turkish")  # with stems and stop words
CJK = "\u3005-\u30ff\u3400-\u9fff\uf900-\ufaff"  # Chinese and Japanese: no spaces between words
_CJK_CHARACTER = rf"(?!\W)[{CJK}]"  # without punctuation
_CJK_RUN = re.compile(f"(?:{_CJK_CHARACTER})+")
# Invisible characters that do not end a word: soft hyphens, joiners, marks of writing direction.
# The space and the non-joiner of zero width do end one, in Khmer and Persian.
_HIDDEN = re.compile("[\u00ad\u061c\u200d-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")
# A word of one character, but for what an apostrophe joins to another word: "l'eau", "dog's".
_SINGLE = r"(?<![^\W\d]['\u2019])[^\W_](?!['\u2019]\w\w)"
_WIDE = re.compile("[\uff01-\uff9f]+")  # full-width letters and half-width katakana
# Characters that stand for several letters, as ﬁ, or for a letter's form in print, as in Arabic.
_FORMS = re.compile("[\ufb00-\ufb17\ufb50-\ufdff\ufe70-\ufefc]+")


@dataclasses.dataclass(frozen=True)
class Bm25Settings:
    """How words are counted, in an index and in the questions to it.

    FLAGS are False only for an index from before they existed.

    Attributes:
        k1: saturation: with a small one, further occurrences of a word count less; from 0 on.
        b: how much longer passages are discounted, 0 to 1.
        language: of Snowball's stems and the stop words, one of LANGUAGES; "none" = no stems and no
            stop words.
        parts_cjk: Chinese and Japanese count by characters and pairs of them. False: everything
            between two spaces or punctuation marks is one word.
        keeps_marks: a word keeps its combining marks, however they are encoded, full-width and
            half-width forms are normalized, and Turkish is lower-cased as Turkish. False: words end
            at their marks, and those of Hindi or Thai are hardly found.
        drops_hidden: soft hyphens and the like are removed from words. False: they end a word.
        parts_ligatures: the letters of ligatures count, as in text copied from a PDF, and those of
            Arabic whatever their form. False: ligatures and forms are letters of their own.
        keeps_single: words of one letter or digit count, as "vitamin K" and "rule 7" have them, but
            for those of "l'eau" and "dog's"; and "İ" is an I with a dot that does not. False: a
            word has two characters, and İstanbul is found by no other spelling.
    """

    k1: float = 0.9
    b: float = 0.4
    language: str = "english"
    parts_cjk: bool = True
    keeps_marks: bool = True
    drops_hidden: bool = True
    parts_ligatures: bool = True
    keeps_single: bool = True

    def __post_init__(self):
        numbers = all(isinstance(x, int | float) for x in (self.k1, self.b))
        if not numbers or not 0 <= self.k1 <= LARGEST_K1 or not 0 <= self.b <= 1:
            raise RetrievalError(f"BM25: k1={self.k1!r}, b={self.b!r}; allowed are k1 from 0 to "
                                 f"{LARGEST_K1:g} and b from 0 to 1.")
        if self.language not in (*LANGUAGES, "none"):
            raise RetrievalError(f"BM25: language={self.language!r:.80}; allowed are "
                                 f"{', '.join(LANGUAGES)} and none.")

    @property
    def record(self) -> dict[str, Any]:
        """The settings as an index's manifest has them."""
        stemmer = None if self.language == "none" else self.language
        return {"method": METHOD, "k1": self.k1, "b": self.b, "stemmer": stemmer,
                "stopwords": "en" if stemmer == "english" else stemmer, "text": "title and text"}

    @property
    def fingerprint(self) -> str:
        """Identifies the settings, in place of an encoder's fingerprint."""
        return "bm25-" + hashlib.sha256(json.dumps(self.record).encode()).hexdigest()[:16]

    @classmethod
    def of_config(cls, retrieval: RetrievalConfig) -> "Bm25Settings":
        """The settings of a configuration."""
        return cls(retrieval.bm25_k1, retrieval.bm25_b, retrieval.bm25_language)

    @classmethod
    def of_manifest(cls, path: Path, manifest: dict[str, Any]) -> "Bm25Settings":
        """The settings that a manifest has.

        Raises:
            RetrievalError: they are not settings of this BM25.
        """
        record = manifest.get("settings")
        try:
            settings = cls(record["k1"], record["b"], record["stemmer"] or "none",
                           **{flag: manifest.get(flag) is True for flag in FLAGS})
            same = settings.record == record
        except (TypeError, KeyError) as error:
            raise RetrievalError(f"{path}: manifest.json has the settings {record!r:.80}, which "
                                 f"are not BM25's; {AGAIN}.") from error
        if not same or manifest["encoder_fingerprint"] != settings.fingerprint:
            raise RetrievalError(f"{path}: built by another BM25 ({record!r:.200}); build it "
                                 "again.")
        return settings


def bm25_missing(extra: str = "bm25") -> str | None:
    """Returns None if BM25 can run, else what to install: the extra that has its libraries."""
    missing = [name for name in ("bm25s", "Stemmer") if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"{', '.join(missing)} not installed: pip install 'rag_jax[{extra}]'"


@functools.cache  # so that users can set the level of its logger afterwards
def _library() -> types.ModuleType:
    logger = logging.getLogger("bm25s")
    level = logging.NOTSET if "bm25s" in sys.modules else logger.level
    import bm25s

    logger.setLevel(level or logging.WARNING)  # importing it sets DEBUG
    return bm25s


def _words(texts: Iterable[str], settings: Bm25Settings, progress: bool = False
           ) -> list[list[str]]:
    """The stems of each text, in its order."""
    import Stemmer

    record = settings.record
    stemmer = Stemmer.Stemmer(record["stemmer"]) if record["stemmer"] else None
    pattern = r"(?u)\b\w\w+\b"
    if settings.drops_hidden:
        texts = (_HIDDEN.sub("", text) for text in texts)
    if settings.parts_ligatures:
        texts = (_FORMS.sub(_plain, text) for text in texts)
    if settings.keeps_marks:
        pattern = rf"\w[\w{marks()}]+"
        texts = (_WIDE.sub(_plain, unicodedata.normalize("NFC", text)) for text in texts)
    if settings.keeps_marks and settings.language == "turkish":
        texts = (text.translate({ord("İ"): "i", ord("I"): "ı"}) for text in texts)
    if settings.keeps_single:
        pattern = f"{pattern}|{_SINGLE}"
        texts = (text.replace("İ", "I").replace("i\u0307", "i") for text in texts)
    if settings.parts_cjk:
        pattern = f"{pattern}|{_CJK_CHARACTER}"
        texts = (_CJK_RUN.sub(_parts, text) for text in texts)
    return _library().tokenize(texts, token_pattern=pattern, stopwords=record["stopwords"],
                               return_ids=False, stemmer=stemmer, show_progress=progress)


@functools.cache
def marks() -> str:
    """Unicode's combining marks, which \\w of Python's re does not match."""
    places = itertools.chain(range(0x300, 0x1F000), range(0xE0100, 0xE01F0))
    return "".join(c for c in map(chr, places) if unicodedata.category(c)[0] == "M")


def _plain(run: re.Match) -> str:
    return unicodedata.normalize("NFKC", run[0])


def _parts(run: re.Match) -> str:
    characters = run[0]
    return " ".join(["", *characters, *map("".join, itertools.pairwise(characters)), ""])


class Bm25Index(Index):
    """An open BM25 index directory. Its queries are texts.

    Attributes:
        path: the directory.
        manifest: that of the open version.
        passages: the PassageStore with the text and tokens of every row.
        settings: how words are counted.
    """

    def __init__(self, folder: IndexFolder):
        self.path, self.manifest, self.passages, files, _ = folder
        self.size, path = self.manifest["size"], self.path
        self.settings = Bm25Settings.of_manifest(path, self.manifest)
        files.check_all()
        try:
            self._bm25 = _library().BM25.load(path / "bm25", mmap=True, allow_pickle=False,
                                              backend="numpy")
            good = self._fits()
        except (ValueError, KeyError, TypeError, AttributeError, OSError, OverflowError,
                RecursionError, tokenize.TokenError) as error:  # of the headers of arrays
            raise RetrievalError(
                f"{path}: bm25/ cannot be read ({error}); build it again.") from None
        if not good:
            raise RetrievalError(f"{path}: bm25/ is damaged: its numbers do not fit {self.size} "
                                 "passages; build it again.")

    def _fits(self) -> bool:
        """Whether all numbers are in the range that a search needs: anybody can make a checksum."""
        index, scores = self._bm25, self._bm25.scores
        data, indices, indptr = (scores[name] for name in ("data", "indices", "indptr"))
        # After all words, the library also lists the empty one.
        columns = [column for word, column in index.vocab_dict.items() if word]
        if any(type(column) is not int for column in columns):
            return False
        words = np.fromiter(columns, np.int64, len(columns))
        shapes = data.ndim == indices.ndim == indptr.ndim == 1 and len(data) == len(indices)
        return bool(
            index.method == METHOD and scores["num_docs"] == self.size and shapes
            and data.dtype == np.float32 and index.dtype == "float32" and index.int_dtype == "int32"
            and 0 < data.min(initial=1) and data.max(initial=1) <= LARGEST  # False for NaN
            and indices.dtype.kind == indptr.dtype.kind == "i" and len(indptr)
            and indptr[0] == 0 and indptr[-1] == len(data) and (np.diff(indptr) > 0).all()
            and 0 <= indices.min(initial=0) and indices.max(initial=0) < self.size
            and 0 <= words.min(initial=0) and words.max(initial=0) < len(indptr) - 1)

    @classmethod
    def open(cls, path: str | os.PathLike) -> "Bm25Index":
        """Opens the current version of an index directory, wherever it was moved.

        Raises:
            RetrievalError: there is no BM25 index, it is damaged or of other settings, or a library
                is missing.
        """
        if missing := bm25_missing():
            raise RetrievalError(f"{path}: a BM25 index; {missing}.")
        index = opened(Path(path), lambda folder: cls(open_folder(folder, ("bm25",))))
        for store in index.passages.stores:
            store.files.verify()
        return index

    def knows(self, text: str) -> bool:
        """Whether any passage has a word of the text; if not, all score 0."""
        return bool(self._columns([text])[0])

    def _search(self, texts: Sequence[str], k: int) -> SearchResult:
        """A passage that shares no word with the question scores 0."""
        results = []
        for words in self._columns(texts):
            scores = self._bm25.get_scores_from_ids(words)
            positive = scores[scores > 0]  # numpy's partition is slow if most are 0
            least = np.partition(positive, -k)[-k] if len(positive) >= k else np.float32(0)
            better = np.flatnonzero(scores > least)
            ties = np.flatnonzero(scores == least)[: k - len(better)]
            ids = np.concatenate([better[np.argsort(-scores[better], kind="stable")], ties])
            results.append((ids.astype(np.int32), scores[ids]))
        return SearchResult(*map(np.stack, zip(*results, strict=True)))

    def scores(self, texts: Sequence[str], ids: np.ndarray) -> np.ndarray:
        """BM25 scores float32[B, K] of given passages integers[B, K], bitwise those of a search."""
        stored = self._bm25.scores
        scores = np.zeros(ids.shape, np.float32)
        for row, words in enumerate(self._columns(texts)):
            for word in words:
                begin, end = stored["indptr"][word : word + 2]
                passages = stored["indices"][begin:end]  # ascending
                place = np.minimum(np.searchsorted(passages, ids[row]), end - begin - 1)
                scores[row] += np.where(passages[place] == ids[row],
                                        stored["data"][begin:end][place], np.float32(0))
        return scores

    def _columns(self, texts: Sequence[str]) -> list[list[int]]:
        """The known words of each text, as columns of the index, in the text's order."""
        return [self._bm25.get_tokens_ids(words)
                for words in _words(check_texts(texts), self.settings)]


def build_bm25(store: PassageStore, out: str | os.PathLike, overwrite: bool = False,
               settings: Bm25Settings = Bm25Settings()) -> Bm25Index:  # noqa: B008 (frozen)
    """Indexes the words of a passage store and publishes an index directory.

    Args:
        store: the passages.
        out: the index directory; an index of the same passages that is there is returned.
        overwrite: replace another index at out.
        settings: how words are counted.

    Raises:
        RetrievalError: a library is missing, no passage has a word, or something else is at out.
    """
    out = Path(out).absolute()
    if missing := bm25_missing():
        raise RetrievalError(f"{out}: BM25 needs {missing}.")
    inputs = {"kind": "bm25", "encoder_fingerprint": settings.fingerprint,
              "passages_fingerprint": store.fingerprint}
    with claimed(out, inputs, overwrite, Bm25Index.open) as index:
        if index is not None:
            return index
        content = begin_version(out, inputs)
        copy_store(store, content)
        index_words(store, content / "bm25", settings)
        versions = {name: importlib.metadata.version(name) for name in ("bm25s", "PyStemmer")}
        publish_index(content, out, {
            **inputs, "inputs": inputs, "size": len(store), "settings": settings.record,
            **{flag: getattr(settings, flag) for flag in FLAGS}, "versions": versions})
    return Bm25Index.open(out)


def index_words(store: PassageStore, folder: Path, settings: Bm25Settings) -> None:
    """Counts the words of all passages, and writes bm25s's files into a folder."""
    progress = is_terminal(sys.stderr)
    passages = (store[row] for row in range(len(store)))
    words = _words((f"{passage.title} {passage.text}" for passage in passages), settings, progress)
    if not any(words):
        raise RetrievalError(f"{store.path}: no passage has a word that BM25 counts; stop words "
                             f"({settings.language}) are left out.")
    index = _library().BM25(k1=settings.k1, b=settings.b, method=METHOD)
    # Numbered as they come: bm25s would number them in the order of a set, which is another one in
    # each process.
    numbers: dict[str, int] = {}
    ids = [[numbers.setdefault(word, len(numbers)) for word in row] for row in words]
    index.index((ids, numbers), show_progress=progress)
    index.save(folder, show_progress=progress)
