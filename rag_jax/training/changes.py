"""Which fields of a configuration a later command on a workdir may set otherwise.

`RULES` has the answer for every field: until when a later training may, and what another value
would be to a command that opens the workdir, to answer or to evaluate.
"""

import pathlib
from typing import Literal, NamedTuple

from rag_jax.config import RUNS, Config, ConfigError, overrides
from rag_jax.config.overrides import shown, value
from rag_jax.steps import has_checkpoint, has_stopped, made_of_data, steps_taken

Opened = Literal["free", "unread", "built", "model"]


class Rule(NamedTuple):
    """Which commands may set a field otherwise than a workdir has it.

    Attributes:
      until: when a later training no longer may: never; once the data are prepared; once a stage or
        an index is made of them; once there is a checkpoint of the warm-up of that name; or of a
        run that reads the field. Before the data are prepared, it may set every field.
      opened: what another value is to who opens the workdir: free to choose; unread, as only
        training reads it; built into an index, and so unread where none is built; another model
        than was trained.
    """

    until: Literal["never", "data", "made", "retriever", "generator", "run"]
    opened: Opened


# Files of passages and of questions.
FILES = ("data.passages", "data.train", "data.dev", "data.test")
# What an index of words was built with.
WORDS = ("retrieval.bm25_k1", "retrieval.bm25_b", "retrieval.bm25_language")
# How a hybrid run joins words with embeddings.
JOINING = ("retrieval.fusion", "retrieval.bm25_weight")
# A field, or a section of fields -> its rule. Of several, the narrowest holds.
RULES = {
    "seed": Rule("data", "free"),
    "dropout_keys": Rule("data", "unread"),
    **dict.fromkeys(("runs", "tensorboard", "eval", "mesh"), Rule("never", "free")),
    "data": Rule("data", "free"),
    **dict.fromkeys(("data.data_dir", "data.length_buckets"), Rule("never", "free")),
    **dict.fromkeys((*FILES, "data.fictional_countries", "data.world_task", "data.world_cards",
                     "data.world_seed", "data.generator_vocab", "data.retriever_vocab"),
                    Rule("data", "unread")),
    **dict.fromkeys(("data.generator_tokenizer", "data.retriever_tokenizer"),
                    Rule("data", "model")),
    "model": Rule("made", "model"),
    **dict.fromkeys(("model.head", "model.generator.family"), Rule("data", "model")),
    "model.reranker": Rule("made", "free"),
    **{f"model.{tower}.{name}": Rule("made", "unread")
       for tower in ("retriever", "generator")
       for name in ("dropout", "attention_dropout", "activation_dropout", "init_std",
                    "position_init")},
    **{f"model.generator.{name}": Rule("made", "free")
       for name in ("param_dtype", "start_token", "end_tokens")},
    **{f"model.{tower}.{name}": Rule("never", "free")  # how a model is computed
       for tower in ("retriever", "generator", "reranker")
       for name in ("dtype", "remat", "fused_attention", "logit_chunk")},
    "retrieval": Rule("made", "free"),
    **dict.fromkeys(("retrieval.embed_batch_size", "retrieval.capacity"), Rule("never", "free")),
    "retrieval.k": Rule("run", "free"),
    "retrieval.staleness": Rule("run", "unread"),
    **{f"retrieval.{name}": Rule("made", "built")
       for name in ("index", "brute_force_below", "num_leaves", "leaves_to_search", "scann_recall",
                    "reorder", "scann_parts")},
    **dict.fromkeys(WORDS, Rule("made", "built")),
    "retriever_warmup": Rule("retriever", "unread"),
    "generator_warmup": Rule("generator", "unread"),
    "train": Rule("run", "unread"),
    "train.document_encoder": Rule("run", "model"),
    **dict.fromkeys(("train.keep", "train.collapse_guard"), Rule("never", "free")),
    **{f"{stage}.{name}": Rule("never", "free")
       for stage in ("train", "retriever_warmup", "generator_warmup")
       for name in ("log_every", "optimizer.update_ratios")},
}
# What a stage that stopped may change before it goes on: the optimiser's state does not depend on
# it.
RATES = ("learning_rate", "warmup_steps", "end_fraction")
# Fields of config.model that runs which retrieve by words neither read nor resolve.
ENCODER_SECTIONS = ("retriever", "query_encoder", "document_encoder")


def rule(name: str) -> Rule:
    """The rule of a dotted field."""
    while name not in RULES:
        name = name.rpartition(".")[0]
    return RULES[name]


def always(name: str) -> bool:
    """Whether every command may set a dotted field otherwise: no result depends on it, or only
    that of the command."""
    return rule(name).until == "never"


def may_change(name: str, earlier: Config, workdir: pathlib.Path) -> bool:
    """Whether a training may set a field otherwise than `earlier`, the configuration of a workdir
    whose data are prepared."""
    until = rule(name).until
    if until == "never":
        return name != "eval.labels" or not earlier.classes
    if _encodes(name) and overrides.lexical(earlier) and not (
            has_checkpoint(workdir / "retriever") or any((workdir / "indexes").glob("[!.]*"))):
        return True
    if until == "made":
        # Links lead to another workdir's data, which are not compared with its configuration.
        linked = any((workdir / data).is_symlink() for data in ("data", "data/memories"))
        return not linked and not made_of_data(workdir)
    if until == "data":
        return False
    stages = [run for run in earlier.runs if name not in RUNS[run].sets] if until == "run" else (
        [until])
    begun = [workdir / stage for stage in stages if has_checkpoint(workdir / stage)]
    section, _, field = name.partition(".optimizer.")
    if field not in RATES:
        return not begun
    unfinished = [folder for folder in begun
                  if steps_taken(folder) < value(earlier, f"{section}.steps")]
    stopped = [workdir / stage for stage in stages if has_stopped(workdir / stage)]
    return not begun or bool(stopped) and set(unfinished) <= set(stopped)


def _encodes(name: str) -> bool:
    """Whether a dotted field is of an encoder."""
    return name.startswith(tuple(f"model.{section}." for section in ENCODER_SECTIONS))


def check_opened(config: Config, trained: Config, workdir: pathlib.Path, indexes: bool = False
                 ) -> None:
    """Raises ConfigError for a field that a command that opens a workdir sets otherwise, and may
    not.

    config, trained: of one run.
    indexes: the command builds an index; others search one that is there.
    """
    _check_learned_weight(config, trained, workdir)
    lexical = overrides.lexical(config)
    for name in overrides.differences(trained, config):
        opened = rule(name).opened
        if name == "retrieval.retriever" and lexical != overrides.lexical(trained):
            opened = "model"
        elif name == "data.prompt" and not config.prompted:
            opened = "unread"
        elif not config.retrieval.k and name.startswith("model.reranker."):
            opened = "unread"
        elif lexical and _encodes(name) or name.endswith("_dropout") and (
                value(config, name) is None):  # as its family has it
            opened = "free"
        _check(opened, name, config, trained, f"{workdir} was trained with", indexes)


def check_untrained(config: Config, own: Config, had: str, indexes: bool = False) -> None:
    """Raises ConfigError for a field of other value than in `own` that would change nothing where
    nothing is trained.

    Sources decide what the towers are, whatever is said of them; tokenizers may be elsewhere.

    had: what has the values of `own`: "FOLDER was indexed with".
    indexes: as for `check_opened`.
    """
    for name in overrides.differences(own, config):
        if not name.startswith("model.") and not name.endswith("_tokenizer"):
            opened = rule(name).opened
            _check("unread" if opened == "model" else opened, name, config, own, had, indexes)


def check_checkpoint(config: Config, own: Config, source: str) -> None:
    """Raises ConfigError for a field of another model than the checkpoint `source` is, whose
    configuration is `own`; its tokenizers may be elsewhere, and it is read in either form of its
    layers."""
    for name in overrides.differences(own, config):
        if not name.endswith(("_tokenizer", ".scan_layers")):
            _check(rule(name).opened, name, config, own, f"{source} has")


def _check(opened: Opened, name: str, config: Config, own: Config, had: str,
           indexes: bool = False) -> None:
    """Raises ConfigError for a field of other value than in `own` unless it is free."""
    if opened == "built" and not _is_read(name, config.retrieval.retriever, indexes):
        opened = "unread"
    if name in JOINING and (indexes or not _is_joined(name, config)):
        opened = "unread"
    told = (f"config.{name}={shown(value(config, name))}: {had} "
            f"{shown(value(own, name)) or '(none)'}, and ")
    if opened == "unread":
        others = ("other questions are named with --questions, in Python evaluate(FILE), other "
                  "passages with --index" if name in FILES and not indexes else
                  "leave the field out")
        raise ConfigError(f"{told}this would change nothing; {others}")
    if opened == "model":
        raise ConfigError(f"{told}would be another model; leave the field out, or train with it in "
                          "another workdir")


def _is_read(name: str, retriever: str, indexes: bool) -> bool:
    """Whether a command reads a field that is built into an index: where it builds one. A hybrid
    index counts its words where it is opened, if they have not been counted so."""
    if name in WORDS:
        return retriever == ("bm25" if indexes else "hybrid")
    return indexes and retriever != "bm25"


def _is_joined(name: str, config: Config) -> bool:
    """Whether a run reads a field of JOINING: one that joins words with embeddings, by scores if it
    weighs them."""
    return bool(config.retrieval.k) and config.retrieval.retriever == "hybrid" and (
        name == "retrieval.fusion" or not overrides.by_ranks(config))


def _check_learned_weight(config: Config, trained: Config, path: pathlib.Path) -> None:
    """Raises ConfigError for another weight of words, or another way of joining their scores, where
    a run has learned its own."""
    if trained.train.bm25_weight_rate is None:
        return
    for name in overrides.differences(trained, config):
        if name in ("retrieval.retriever", *JOINING, "train.bm25_weight_rate"):
            raise ConfigError(f"config.{name}={shown(value(config, name))}: {path} has learned its "
                              f"weight of words; leave it at {shown(value(trained, name))}, and use"
                              " --choose-weight of evaluate, Rag.choose_weight in Python, for a "
                              "fixed weight")


def check_classes(config: Config, trained: tuple[str, ...], path: pathlib.Path) -> Config:
    """Raises ConfigError for other classes than a model was trained with."""
    if config.classes != trained:
        raise ConfigError(f"config.eval.labels: {path} was trained with the classes "
                          f"{', '.join(trained) or '(none)'}; leave config.eval.labels and "
                          "config.model.head as they are")
    return config
