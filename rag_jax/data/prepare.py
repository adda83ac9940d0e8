"""Everything that is made from the data once: tokenizers, passage stores, question splits."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from rag_jax import files, hosts
from rag_jax.citation import Citation
from rag_jax.config import Config, ConfigError
from rag_jax.data import inputs
from rag_jax.data.answer_targets import DEPTH, LOOKS_IN_PASSAGES
from rag_jax.data.batches import ENCODER_TABLE, PASSAGE_TABLE
from rag_jax.data.corpora import read_corpus
from rag_jax.data.prepared import SEALED, Prepared, generator_format, open_prepared
from rag_jax.data.question_files import Example, check_labels
from rag_jax.data.question_sources import load_examples
from rag_jax.data.source import Source, World
from rag_jax.data.task_sources import trains_on
from rag_jax.data.text import Cuts, GeneratorFormat, Tokenizer, chunks, encoder_input
from rag_jax.data.tfds_data import prepare_dataset
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.retrieval.bm25 import build_bm25
from rag_jax.retrieval.json_files import write_sealed
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.store_writing import write_store
from rag_jax.retrieval.verification import DIGESTS, write_digests
from rag_jax.steps import made_of_data
from rag_jax.visible import is_terminal

TokenizerSource = str | pathlib.Path | None


class FileTexts(Iterable):
    """Titles and texts of a passage file, read again at each iteration."""

    def __init__(self, path: str):
        self._path = path

    def __iter__(self) -> Iterator[str]:
        return (f"{p.title} {p.text}" for p in read_corpus(self._path))


def chunked(passages: Iterable[Passage], words: int) -> Iterator[Passage]:
    """Passages of at most `words` words; pieces of a split one get ids ID.0, ID.1, ..."""
    for passage in passages:
        pieces = list(chunks(passage.text, words)) if words else [passage.text]
        if len(pieces) == 1:
            yield passage._replace(text=pieces[0])
        else:
            for number, piece in enumerate(pieces):
                yield Passage(f"{passage.id}.{number}", passage.title, piece)


def check_trainable(source: str, examples: Iterable[Example]) -> None:
    """Raises ConfigError for a question that can be evaluated, but not trained on."""
    for example in examples:
        if example.regex and not example.targets:
            raise ConfigError(
                f"{source}: question {example.id!r} has regular expressions as answers and no "
                'targets to train on: give it "targets", texts that the expressions match')


def _read(config: Config, world: World | None) -> Source:
    """The files that the configuration names, or else the world."""
    data = config.data
    if data.passages:
        source = _read_files(config)
    elif world is None:
        raise ConfigError("config.data.passages is empty: name a file of passages")
    else:
        hosts.say("config.data.passages is empty: the countries that are shipped are read")
        source = world(data.fictional_countries, inputs.world_seed(config), data.world_task,
                       data.world_cards)
    for name, examples in source.splits.items():
        check_labels(getattr(data, name, name) or name, examples, config.classes)
    return source


def _read_files(config: Config) -> Source:
    data = config.data
    splits = {name: load_examples(getattr(data, name), data_dir=data.data_dir)
              for name in inputs.QUESTIONS if getattr(data, name)}
    if trains_on(data.train) != "matches":  # those get targets once there are passages
        check_trainable(data.train, splits["train"])
    return Source({"passages": chunked(read_corpus(data.passages), data.chunk_words)}, splits)


def prepare(config: Config, workdir: pathlib.Path,
            pretrained: Callable[[str], pathlib.Path | None] = lambda tower: None,
            world: World | None = None) -> Prepared:
    """Makes the data of a workdir that are missing, and opens all; one process at a time.

    Data whose sources have changed are made again, as long as nothing has been made from them in
    turn. Sources may be removed once their data are made.

    Args:
      config: `config.data` names the sources.
      workdir: everything is written to its folder data/.
      pretrained: folder with the tokenizer of a pretrained "query_encoder" or "generator"; None
        where there is none.
      world: makes passages and questions where `config.data.passages` names none.

    Raises:
      ConfigError, DataError: wrong contents of a file, with its name, line and field; or sources
        that have changed since something was trained.
    """
    folder = workdir / "data"
    if inputs.is_prepared(workdir) and folder.is_symlink():  # another workdir's, checked there
        return open_prepared(config, workdir)
    for parent in (folder, folder / "memories"):
        files.remove_leftovers(parent)
    data, record = config.data, folder / inputs.RECORD
    tokenizers = {"retriever_tokenizer": data.retriever_tokenizer or pretrained("query_encoder"),
                  "generator_tokenizer": data.generator_tokenizer or pretrained("generator")}
    earlier = inputs.read(record)
    now = inputs.describe(config, tokenizers, earlier)
    changed = inputs.differences(earlier, now) if earlier else {}
    if changed:
        _check_unused(workdir, changed)
    made = None
    if changed or not inputs.is_prepared(workdir):
        source = _read(config, world)  # before anything is removed
        if changed:
            _remove_outdated(folder, changed)
        elif not earlier:
            _set_aside(folder)
        made = _make(config, folder, tokenizers, now, source)
    elif earlier and (kept := inputs.merged(earlier, now)) != earlier:
        write_sealed(record, kept)
    if not (folder / DIGESTS).exists():
        write_digests(folder, SEALED)  # passage stores have their own
    opened = open_prepared(config, workdir)
    return opened if made is None else dataclasses.replace(opened, splits=made)


def _check_unused(workdir: pathlib.Path, changed: Mapping[str, str]) -> None:
    """Prints what will be made again.

    Raises:
      ConfigError: something other than test results has been made from the data.
    """
    what = "\n".join(f"  {line}" for line in changed.values())
    uses = sorted(made_of_data(workdir))
    if uses and changed.keys() != {"test"}:
        raise ConfigError(
            f"{workdir}: {', '.join(uses)} were made from other data than there are now:\n{what}\n"
            "restore what has changed, or name another --workdir")
    print(f"{workdir}: data are made again, for these have changed:\n{what}", flush=True)


def _remove_outdated(folder: pathlib.Path, changed: Mapping[str, str]) -> None:
    """Removes the data that have to be made again."""
    (folder / inputs.DONE).unlink(missing_ok=True)
    if changed.keys() <= set(inputs.QUESTIONS):
        return  # `prepare_dataset` replaces them; everything else depends on the passages
    for path in _made_of_passages(folder):
        files.remove_folder(path)


def _set_aside(folder: pathlib.Path) -> None:
    """Renames data that an unfinished preparation left without a record of what they were made
    from; they may not even be ours."""
    for path in _made_of_passages(folder):
        kept = files.set_aside(path, "earlier")
        print(f"{path}: there is no record of what it was made from; it is {kept} now", flush=True)


def _made_of_passages(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of a data folder that depend on its passages; links lead to another workdir's."""
    names = ("warmup_texts.txt", "retriever_tokenizer", "generator_tokenizer", "memories", "bm25")
    paths = [folder / name for name in names]
    return [path for path in paths if path.exists() and not path.is_symlink()]


def _make(config: Config, folder: pathlib.Path, tokenizers: Mapping[str, TokenizerSource],
          before: Mapping[str, Any], source: Source) -> dict[str, list[Example]]:
    """Makes what is missing, and last the file that says that the data are complete.

    Returns:
      The questions by split, as they were written, because to read them back takes seconds.

    Raises:
      ConfigError: an input has changed since it was described in `before`, or is wrong.
    """
    (folder / DIGESTS).unlink(missing_ok=True)
    data = config.data
    now = inputs.describe(config, tokenizers, before)  # with what had to be downloaded
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed(folder / inputs.RECORD, now)

    def tokenizer(name: str, train: Callable[..., Tokenizer], size: int) -> Tokenizer:
        """The workdir's own copy: of the one that the configuration names, or trained."""
        own, named = folder / name, tokenizers[name]
        if not (own / "tokenizer.json").exists():
            texts = FileTexts(data.passages) if data.passages else source.warmup_texts
            (Tokenizer.load(named) if named else train(texts, size)).save(own)
        return Tokenizer.load(own)

    retriever = tokenizer("retriever_tokenizer", train_bert_tokenizer, data.retriever_vocab)
    generator = tokenizer("generator_tokenizer", train_bart_tokenizer, data.generator_vocab)
    for name, passages in source.passages.items():
        path = folder / "memories" / name
        if not path.exists():
            write_passages(path, passages, config, retriever, generator_format(config, generator))
    store = PassageStore.open(folder / "memories" / next(iter(source.passages)))
    _check_ids(config, store, source.splits["train"])
    train = _training_examples(data.train, source.splits["train"], store, folder / "bm25")
    splits = {**source.splits, "train": train}
    prepare_dataset("questions", splits, folder / "questions")
    if source.warmup_texts is not None:
        lines = [" ".join(text.split()) for text in source.warmup_texts]
        files.write_text(folder / "warmup_texts.txt", "\n".join(lines))
    if changed := inputs.differences(before, inputs.describe(config, tokenizers, now)):
        raise ConfigError("the data have changed while they were read; run the same command "
                          "again: " + "; ".join(changed.values()))
    names = [" ".join(source.passages), " ".join(source.splits)]
    files.write_text(folder / inputs.DONE, "\n".join(names))
    return splits


def write_passages(path: pathlib.Path, passages: Iterable[Passage], config: Config,
                   retriever: Tokenizer | None, layout: GeneratorFormat | None,
                   source: Callable[[str], Citation] | None = None) -> PassageStore:
    """A passage store with the token tables of both models; prints what is too long for them.

    Args:
      path, passages, source: as for `write_store`.
      config: how passages are read.
      retriever, layout: the retriever's tokenizer and the generator's format; None = no such model.
    """
    longest, embedded, read = config.data.max_passage_length, Cuts(), Cuts()

    def generator_input(ps: Sequence[Passage]) -> list[list[int]]:
        rows = layout.passages([p.title for p in ps], [p.text for p in ps])
        lengths = np.array([len(row) for row in rows], np.int64)
        read.count(lengths, layout.kept(lengths, np.zeros_like(lengths)))
        return rows

    def encoders_input(ps: Sequence[Passage]) -> list[list[int]]:
        return encoder_input(retriever, [p.title for p in ps], [p.text for p in ps], longest,
                             embedded, config.model.retriever)

    encoders = {PASSAGE_TABLE: generator_input} if layout else {}
    if retriever:
        encoders[ENCODER_TABLE] = encoders_input
    with tqdm(desc=f"passages of {path.name}", unit=" passages",
              disable=not is_terminal(sys.stderr)) as bar:
        store = write_store(path, passages, encoders, bar.update, source)
    lexical = config.retrieval.retriever == "bm25"
    for cuts, field, value in ((embedded, "max_passage_length", 0 if lexical else longest),
                               (read, "max_source_length", layout and layout.max_length)):
        if cuts.lost and value:
            more = ", and more for the question" if field == "max_source_length" else ""
            print(f"{cuts} by config.data.{field}={value}{more}", flush=True)
    return store


def _training_examples(train: str, examples: list[Example], store: PassageStore,
                       scratch: pathlib.Path) -> list[Example]:
    """The examples with the targets of the paper's appendix D, found by BM25 over a passage store.

    scratch: folder for the BM25 index, which is removed in the end.
    """
    targets_from = LOOKS_IN_PASSAGES.get(trains_on(train))
    if targets_from is None:
        return examples
    index = build_bm25(store, scratch)

    def retrieve(question: str) -> list[str]:
        rows = index.search([question], min(DEPTH, index.size)).ids[0]
        return [store[int(row)].text for row in rows]

    shown = tqdm(examples, "Looking for answers in passages", disable=not is_terminal(sys.stderr))
    examples = list(targets_from(shown, retrieve))
    check_trainable(train, examples)
    files.remove_folder(scratch)
    return examples


def _check_ids(config: Config, store: PassageStore, examples: Iterable[Example]) -> None:
    """Every positive and negative passage of a training question must exist."""
    known: set[str] = set()
    for example in examples:
        for passage_id in (*example.positive_ids, *example.negative_ids):
            if passage_id in known:
                continue
            try:
                store.row_of(passage_id)
            except RetrievalError as error:
                pieces = (" With config.data.chunk_words, the pieces of a split passage are "
                          "called ID.0, ID.1, ..." if config.data.chunk_words else "")
                raise ConfigError(f"{config.data.train or 'train'}: question {example.id!r} names "
                                  f"a passage that is not there. {error}{pieces}") from None
            known.add(passage_id)
