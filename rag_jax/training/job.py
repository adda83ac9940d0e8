"""What every stage of a training run needs: configuration, workdir, data, mesh and architecture."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rag_jax import hosts, parallel
from rag_jax.config import Config, ConfigError, EvalConfig, GeneratorConfig, overrides
from rag_jax.data.packed import Groups
from rag_jax.data.prepared import Prepared
from rag_jax.data.question_files import Example
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.text import Tokenizer
from rag_jax.fusion import Fusion
from rag_jax.models import rag
from rag_jax.models.stack import unstack_layers
from rag_jax.retrieval.bm25 import Bm25Index
from rag_jax.retrieval.hybrid import HybridIndex
from rag_jax.retrieval.index import PassageIndex

Index = PassageIndex | Bm25Index | HybridIndex


@dataclasses.dataclass(frozen=True)
class Job:
    """What every stage needs."""

    config: Config
    workdir: pathlib.Path
    prepared: Prepared
    mesh: Mesh

    @property
    def model(self) -> rag.RagModel:
        """The architecture, with table sizes filled in from the tokenizers."""
        return build_model(self.config, self.prepared)

    @property
    def trains_with(self) -> str:
        """Name of the passage store, and of its index, that runs train with: the first."""
        return next(iter(self.prepared.stores))

    def of_run(self, run: str, how: EvalConfig | None = None) -> "Job":
        """The job of one of config.runs, with the configuration of that run.

        how: its `config.eval`; None = as in the configuration.
        """
        config = overrides.for_run(self.config, run)
        return dataclasses.replace(self, config=dataclasses.replace(
            config, eval=how or config.eval))

    def tokens(self, split: str) -> QuestionTokens:
        """The questions of a split, tokenized once for all runs with the same settings of them."""
        config, known = self.config, self.prepared.tokenized
        decided_by = (split, config.data, config.classes, config.head_classes)
        if decided_by not in known:
            known[decided_by] = self.tokenize(self.prepared.splits[split])
        return known[decided_by]

    def tokenize(self, examples: Sequence[Example]) -> QuestionTokens:
        """The questions and answers as token ids; every process has to have the same ones.

        Raises:
          ConfigError: the processes have read different questions, which batches would mix.
        """
        data = self.config.data
        hosts.check_same_content("the questions and answers", [
            [e.question, *(e.targets or e.answers)] for e in examples])
        return QuestionTokens(examples, self.prepared.retriever_tokenizer, self.prepared.format,
                              data.max_question_length, data.max_target_length,
                              self.config.classes, self.config.head_classes > 0,
                              self.config.model.retriever)


def build_model(config: Config, prepared: Prepared) -> rag.RagModel:
    """The model of a configuration.

    Raises:
      ConfigError: a configured table is smaller than its tokenizer.
    """
    towers = {}
    for name, tokenizer in (("retriever", prepared.retriever_tokenizer),
                            ("generator", prepared.generator_tokenizer)):
        tower = getattr(config.model, name)
        if 0 < tower.vocab_size < tokenizer.vocab_size:
            _check_rows(config, name, tokenizer)
        towers[name] = dataclasses.replace(
            tower, pretrained="", vocab_size=tower.vocab_size or tokenizer.vocab_size)
    generator, tokenizer = towers["generator"], prepared.generator_tokenizer
    ends, start = end_tokens(generator, tokenizer), prepared.format.start
    if start is None:
        start = generator.start_token
    if not all(0 <= end < generator.vocab_size for end in ends):
        raise ConfigError(f"config.model.generator.end_tokens={ends}: must be below vocab_size="
                          f"{generator.vocab_size}")
    if start >= generator.vocab_size:
        raise ConfigError(f"config.model.generator.start_token={start}: must be below vocab_size="
                          f"{generator.vocab_size}")
    return rag.RagModel(
        towers["retriever"], dataclasses.replace(generator, end_tokens=ends), config.kind,
        start_id=tokenizer.end if start < 0 else start,
        end_id=tokenizer.end,
        pad_id=tokenizer.pad,
        null_document=config.model.null_document,
        lexical=config.retrieval.retriever == "bm25",
        classes=config.head_classes,
        fusion=fusion_of(config),
        reranked=bool(config.model.reranker.pretrained and config.retrieval.k))


def end_tokens(generator: GeneratorConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer, where there are several; () where there is one.

    The first is the one that ends the targets in training. The checkpoint's own come after it, as
    they may differ from the end of a turn in its chat template.

    Args:
      generator: with the end_tokens of its checkpoint.
      tokenizer: of the format of its inputs.
    """
    ends = dict.fromkeys((tokenizer.end, *(generator.end_tokens or (tokenizer.own_end,))))
    return tuple(ends) if len(ends) > 1 else ()


def _check_rows(config: Config, name: str, tokenizer: Tokenizer) -> None:
    """Raises ConfigError where the token table of a tower has no row for an id of its inputs."""
    rows, needed = getattr(config.model, name).vocab_size, tokenizer.needed_rows
    source = config.model.sources.get("generator" if name == "generator" else "query_encoder")
    if name == "generator" and not source:  # the inputs of its warm-up have mask tokens
        needed = max(needed, tokenizer.mask + 1)
    if rows < needed:
        raise ConfigError(
            f"config.model.{name}.vocab_size={rows}: the ids of the tokenizer need {needed} rows; "
            + (f"name the tokenizer that {source} was trained with as config.data.{name}_tokenizer"
               if source else "set at least that, or 0 to take its size"))


def groups_of(model: rag.RagModel, mesh: Mesh, pieces: int) -> Groups | None:
    """The groups in which training packs the generator's inputs and targets; None = no packing.

    pieces: micro-batches per step.
    """
    return Groups(parallel.shards(mesh, "batch"), pieces) if model.packs else None


def fusion_of(config: Config) -> Fusion | None:
    """How the scores of embeddings and words are joined; None = there is one kind of scores."""
    retrieval = config.retrieval
    if retrieval.retriever != "hybrid" or not retrieval.k:
        return None
    return Fusion(retrieval.fusion, retrieval.bm25_weight,
                  config.train.bm25_weight_rate is not None)


# Fingerprints depend on this order: with another one, no earlier index would be accepted.
_ARCHITECTURE = ("pretrained", "vocab_size", "max_positions", "type_vocab_size", "width", "layers",
                 "heads", "mlp_width", "activation", "dropout", "attention_dropout",
                 "layer_norm_eps", "projection", "position_init", "dtype", "remat", "scan_layers",
                 "init_std")
_MODERN = ("local_attention", "global_every", "rope_theta", "rope_local_theta")


def fingerprint(model: rag.RagModel, params: Any) -> str:
    """Names a document encoder: a digest of its architecture and its parameters.

    Properties that DPR's encoders do not have are added only where an encoder has them, so that the
    fingerprints of DPR's encoders never change.
    """
    values = {**dataclasses.asdict(model.retriever), "dtype": "", "remat": "none"}
    fields = ", ".join(f"{name}={values[name]!r}" for name in _ARCHITECTURE)
    digest = hashlib.sha256(f"BertConfig({fields})".encode())
    beyond = model.retriever.beyond_dpr
    if model.retriever.model_type != "bert":
        beyond["model_type"] = model.retriever.model_type
    if model.retriever.model_type == "modernbert":
        beyond |= {name: values[name] for name in _MODERN}
    if beyond:
        digest.update(repr(sorted(beyond.items())).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(unstack_layers(params)):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(parallel.fetch(leaf)).tobytes())
    return digest.hexdigest()[:16]
