"""The data of a workdir, opened: tokenizers, passage stores, questions; they know no model."""

import dataclasses
import functools
import logging
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rag_jax.config import BertConfig, Config, ConfigError
from rag_jax.data.batches import ENCODER_TABLE, PASSAGE_TABLE
from rag_jax.data.inputs import DONE
from rag_jax.data.prompts import TEMPLATES, PromptFormat, parts_of
from rag_jax.data.question_files import Example
from rag_jax.data.question_sources import load_examples
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.text import GeneratorFormat, Tokenizer, encoder_input
from rag_jax.retrieval.json_files import FILE_NAME, refuse_links
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.retrieval.verification import DIGESTS, open_digests

_log = logging.getLogger(__name__)
SEALED = (DONE, "questions", "warmup_texts.txt", "retriever_tokenizer", "generator_tokenizer")


class StoreTexts(Sequence):
    """The texts of a passage store, read when asked for."""

    def __init__(self, store: PassageStore):
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, row: int) -> str:
        return self._store[int(row)].text


class LazyMapping(Mapping[str, Any]):
    """Values by name, each opened when it is first asked for."""

    def __init__(self, names: Iterable[str], open_one: Callable[[str], Any]):
        self._values: dict[str, Any] = dict.fromkeys(names)
        self._open = open_one

    def __getitem__(self, name: str) -> Any:
        if self._values[name] is None:
            self._values[name] = self._open(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A workdir's data, opened.

    Attributes:
      retriever_tokenizer, generator_tokenizer, format: text to ids.
      stores: passage stores by name; the first one trains.
      splits: train, dev, test and whatever else the source has.
      warmup_file: texts for the generator's warm-up; None = the passages that train.
      tokenized: splits as token ids, by everything that they depend on; runs with the same
        settings share them.
    """

    retriever_tokenizer: Tokenizer
    generator_tokenizer: Tokenizer
    format: GeneratorFormat
    stores: Mapping[str, PassageStore]
    splits: Mapping[str, list[Example]]
    warmup_file: pathlib.Path | None = None
    tokenized: dict[tuple, QuestionTokens] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def warmup_texts(self) -> Sequence[str]:
        """What the generator's warm-up learns to restore."""
        if self.warmup_file is not None:
            return self.warmup_file.read_text("utf-8").split("\n")
        return StoreTexts(next(iter(self.stores.values())))


def open_prepared(config: Config, workdir: pathlib.Path) -> Prepared:
    """Opens the data of a workdir that has them; writes nothing, and reads questions and passages
    when they are asked for.

    Raises:
      RetrievalError: a file is damaged; it is named.
    """
    folder = workdir / "data"
    for name in SEALED:
        refuse_links(folder / name)
    digests = open_digests(folder)
    if digests is not None:
        digests.check_all()
    else:
        _warn_unverified(folder)
    retriever_tokenizer = Tokenizer.load(
        folder / "retriever_tokenizer", config.model.retriever.vocab_size)
    generator_tokenizer = Tokenizer.load(
        folder / "generator_tokenizer", config.model.generator.vocab_size)
    store_names, split_names = (line.split() for line in (folder / DONE).read_text().splitlines())
    for name in (*store_names, *split_names):
        if not re.fullmatch(FILE_NAME, name):  # it becomes that of a folder, also of an index
            raise RetrievalError(f"{folder / DONE}: {name!r:.80} is no name of passages or "
                                 "questions; prepare the data again, in a new workdir")
    warmup = folder / "warmup_texts.txt"
    format = generator_format(config, generator_tokenizer)
    return Prepared(
        retriever_tokenizer, format.tokenizer, format,
        LazyMapping(store_names, lambda name: _open_store(folder / "memories" / name, format)),
        LazyMapping(split_names,
                    lambda name: load_examples(f"tfds-dir:{folder / 'questions'}:{name}")),
        warmup if warmup.exists() else None)


def _open_store(path: pathlib.Path, format: GeneratorFormat) -> PassageStore:
    store = PassageStore.open(path)
    if PASSAGE_TABLE in store.token_tables and not has_tokens_of(store, format):
        raise ConfigError(f"{path}: an earlier version of rag_jax wrote its passages in other "
                          "tokens than this one writes for this generator; name another "
                          "--workdir, or go on with that version")
    return store


def has_tokens_of(store: PassageStore, format: GeneratorFormat) -> bool:
    """Whether `_sample` of a store has the tokens that the generator's format gives it."""
    titles, texts, tokens = _sample(store, PASSAGE_TABLE)
    return tokens == format.passages(titles, texts)


def has_encoder_tokens_of(store: PassageStore, tokenizer: Tokenizer, encoder: BertConfig) -> bool:
    """Whether `_sample` of a store has the tokens from which the encoder embeds it, up to the
    length at which they were cut."""
    return all([row] == encoder_input(tokenizer, [title], [text], len(row), encoder=encoder)
               for title, text, row in zip(*_sample(store, ENCODER_TABLE), strict=True))


def _sample(store: PassageStore, table: str) -> tuple[list[str], list[str], list[list[int]]]:
    """Titles, texts and tokens of passages of a store: the first, the last, which an edit may have
    added, and one between."""
    rows = (0, len(store) // 2, len(store) - 1)
    titles, texts = ([getattr(store[row], part) for row in rows] for part in ("title", "text"))
    return titles, texts, [store.tokens(table).row(row).tolist() for row in rows]


@functools.cache
def _warn_unverified(folder: pathlib.Path) -> None:
    """Warns once for each workdir, however often a process opens it."""
    _log.warning("%s: its tokenizers and questions are not verified: there is no %s, which earlier "
                 "versions did not write. python -m rag_jax.train on this workdir writes it.",
                 folder, DIGESTS)


def generator_format(config: Config, tokenizer: Tokenizer) -> GeneratorFormat:
    """How the generator reads passages and questions."""
    data, form = config.data, config.data.source_format
    uncased = data.question_text == "uncased_roundtrip"
    if form == "auto" and config.model.generator.family == "causal":
        form = "prompt"
    if form in TEMPLATES:
        chat = tokenizer.config.get("chat_template") if form == "chat" else None
        if form == "chat" and chat is None:
            raise ConfigError("config.data.source_format=chat: the generator's tokenizer has no "
                              "chat_template; set config.data.source_format=prompt")
        parts = parts_of(data.prompt or TEMPLATES[form], chat, tokenizer)
        return PromptFormat(tokenizer, data.max_source_length, parts, uncased)
    return GeneratorFormat(tokenizer, data.max_source_length, uncased_questions=uncased,
                           like_hugging_face=form == "hugging_face",
                           question_first=form == "question_first")
