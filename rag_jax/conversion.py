"""Between Hugging Face folders and workdirs: what `python -m rag_jax.convert` does.

A converted workdir holds a checkpoint for each tower (query_encoder/, document_encoder/,
generator/, or bert/ for a plain BERT), the tokenizers and a config.json with the architecture and
the checkpoint's settings of generation, so that configs can name it where they would name the
original.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from rag_jax import files, parallel
from rag_jax.config import (
    BartConfig,
    BertConfig,
    Config,
    ConfigError,
    DataConfig,
    EvalConfig,
    GeneratorConfig,
    ModelConfig,
    TrainConfig,
    overrides,
)
from rag_jax.data.inputs import is_prepared
from rag_jax.data.prepared import generator_format
from rag_jax.data.text import Tokenizer
from rag_jax.documents import workdir as documents
from rag_jax.hub import families, generator_inputs
from rag_jax.hub import load as hub
from rag_jax.hub.card import Beyond, Provenance, model_card
from rag_jax.hub.config_json import Architecture, SpecialIds
from rag_jax.hub.save import ids_of, save
from rag_jax.models import rag
from rag_jax.retrieval.json_files import read_object
from rag_jax.retrieval.verification import write_digests
from rag_jax.steps import warn_of_unfinished
from rag_jax.training import pretrained, workdir
from rag_jax.training.checkpoint import NO_OPTIMISER, Checkpointer
from rag_jax.training.job import end_tokens, fusion_of

TOKENIZERS = {"query_encoder": "retriever_tokenizer", "document_encoder": "retriever_tokenizer",
              pretrained.PLAIN: "retriever_tokenizer", "generator": "generator_tokenizer"}
RAG_FAMILY = {"token": "RagTokenForGeneration", "sequence": "RagSequenceForGeneration"}
KINDS = {family: kind for kind, family in RAG_FAMILY.items()}


def convert(source: str, target: str, run: str | None = None, family: str | None = None) -> str:
    """Brings a Hugging Face checkpoint into a workdir, or a workdir into Hugging Face folders.

    Args:
      source: name on the hub, checkpoint folder, or workdir; of a workdir of `ingest`, the models
        that were trained on its documents are exported.
      target: a new or empty folder, which appears when it is complete.
      run: one of a trained workdir; None = its first run, or the warm-up stages where no run has
        been trained.
      family: class of transformers to write; None = the one that the model's parts fit.

    Returns:
      What was written, in words.

    Raises:
      ConfigError, HubError, CheckpointError, FolderError: something is missing, damaged or in the
        way.
    """
    workdir.named("--from", source)  # as it is written: "./a/b" is no name of the hub
    source = os.fspath(source)
    out = workdir.named("--to", target).absolute()
    if out.is_symlink() or out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--to={target} exists and is no empty folder; name a new one")
    files.check_parent(out)
    if workdir.exists(source):
        path = documents.answering(pathlib.Path(source).absolute())
        if documents.exists(path):
            raise ConfigError(f"--from={source} has no trained run: its models are as its sources "
                              "have them. To export others, train them with rag_jax.ingest --train")
        return _export(path, out, run, family)
    if run or family:
        raise ConfigError("--run and --family are for exporting a workdir, which "
                          f"--from={source} is not")
    return _import(source, out)


def _import(source: str, out: pathlib.Path) -> str:
    if families.RERANKER in pretrained.described(source).towers:
        raise ConfigError(f"--from={source}: a cross-encoder is read where it is: name it as "
                          "config.model.reranker.pretrained")
    checkpoint = hub.load(source)
    files.remove_leftovers(out.parent)
    with files.new_folder(out) as temporary:
        ids = checkpoint.ids and dataclasses.asdict(checkpoint.ids)
        meta = {"family": checkpoint.family, "ids": ids, "source": source}
        for tower, params in checkpoint.params.items():
            stored = "query_encoder" if tower == pretrained.PLAIN else tower
            with Checkpointer(temporary / tower) as checkpointer:
                checkpointer.save(0, {stored: params}, NO_OPTIMISER, meta)
        for tower, folder in checkpoint.tokenizers.items():
            Tokenizer.load(folder).save(temporary / "data" / TOKENIZERS[tower])
        if checkpoint.tokenizers:
            write_digests(temporary / "data", TOKENIZERS.values())
        workdir.write(config_of(checkpoint), temporary / "config.json")
    return f"{checkpoint.family}: {', '.join(checkpoint.params)} in {out}"


def config_of(checkpoint: hub.Pretrained) -> Config:
    """A configuration with the checkpoint's architecture, and lengths that fit its positions."""
    retriever = checkpoint.retriever or BertConfig()
    generator = checkpoint.generator or BartConfig()
    usual, answers = DataConfig(), pretrained.generation_settings(checkpoint)
    wanted = {"max_question_length": (usual.max_question_length, retriever),
              "max_passage_length": (checkpoint.longest or usual.max_passage_length, retriever),
              "max_source_length": (usual.max_source_length, generator),
              "max_target_length": (
                  answers.pop("max_length", usual.max_target_length), generator)}
    data = {name: min(length, tower.max_positions) for name, (length, tower) in wanted.items()}
    if generator.family == "causal":  # the answer continues the prompt
        data["max_source_length"] = min(
            data["max_source_length"], generator.max_positions - data["max_target_length"])
    data |= checkpoint.inputs
    run = "fid" if checkpoint.kind == "fid" else f"rag_{checkpoint.kind or 'token'}"
    return Config(runs=(run,), data=DataConfig(**data),
                  model=ModelConfig(retriever, generator), eval=EvalConfig(**answers),
                  train=TrainConfig(steps=0))  # it answers as it is


def _export(path: pathlib.Path, out: pathlib.Path, run: str | None, family: str | None) -> str:
    config = workdir.read(path)
    rows = {name: getattr(config.model, name.removesuffix("_tokenizer")).vocab_size
            for name in TOKENIZERS.values()}
    tokenizers = {tower: Tokenizer.load(path / "data" / name, rows[name])
                  for tower, name in TOKENIZERS.items() if (path / "data" / name).is_dir()}
    if run or (path / workdir.run_of(path, config)).is_dir():
        run = workdir.run_of(path, config, run)
        if not (path / run).is_dir() and not is_prepared(path):
            raise ConfigError(f"--run={run}: {path} has no run, as what rag_jax.convert writes; "
                              "leave --run out")
        config = overrides.for_run(config, run)
        if config.model.null_document != "none":
            raise ConfigError(f"--run={run}: it has a null document (config.model.null_document), "
                              "which transformers' RAG has not; export another run")
    model = _model(config, tokenizers)
    params, ids, kind, base = _params(path, config, run, model, parallel.make_mesh(config.mesh))
    if run and not config.retrieval.k:  # without passages, its encoders are part of nothing
        for tower in pretrained.ENCODERS:
            params.pop(tower, None)
    learned = float(rag.word_weight(model, params)) if rag.FUSION in params else None
    beyond = _beyond(config, run, learned)
    written = _left_out(params, beyond)
    retriever = _as_written(model.retriever, params)
    generator = _with_ends(model.generator, config, tokenizers) if run else model.generator
    if run:  # a reader of the export forces the tokens that the run forces
        asked = workdir.eval_of(path, run)
        ids = ids_of(tokenizers.get("generator"), generator)
        ids = dataclasses.replace(ids, forced_bos=ids.bos if asked.forced_bos else None,
                                  forced_eos=ids.end if asked.forced_eos else None)
    architecture = Architecture(retriever, generator, ids, config.data.max_passage_length)
    base = {tower: source for tower, source in {**config.model.sources, **base}.items()
            if tower in params}
    provenance = _provenance(path, config, run, base, beyond)
    folders = _folders(list(params), architecture, kind, family, path)
    files.remove_leftovers(out.parent)
    with files.new_folder(out) as temporary:
        for place, name, tower in folders:
            parts = families.FAMILIES.get(name)
            plain = parts is not None and pretrained.PLAIN in parts.places
            given, texts = ({pretrained.PLAIN: of[tower]} if plain and tower in of else of
                            for of in (params, tokenizers))
            fields = parts and generator_inputs.inputs_json(
                config.data, parts, path / "data" / TOKENIZERS["generator"])
            card = model_card(parts, provenance) if parts else ""
            save(temporary / place, name, given, architecture, tokenizers=texts, fields=fields,
                 card=card)
            written.append(f"{name} in {out / place}")
    return "; ".join(written)


def _left_out(params: dict[str, Any], beyond: Beyond) -> list[str]:
    """Messages about the parts of a model that have no place in an export; their parameters are
    removed from `params`."""
    messages = []
    if params.pop(rag.CLASSIFIER, None) is not None:
        messages.append("without the classifier, for which there is no class")
    params.pop(rag.FUSION, None)
    for what, fields in beyond.items():
        settings = " ".join(f"config.{name}={value}" for name, value in fields.items())
        messages.append(f"without {what}, on which its p(z|x) depends too; set {settings}")
    return messages


def _beyond(config: Config, run: str | None, learned: float | None) -> Beyond:
    """On what the p(z|x) of a run depends beside its encoders: no class of transformers has it.

    learned: the weight of BM25's scores, if it is.
    """
    if not run or not config.retrieval.k:
        return {}
    beyond = {}
    if config.retrieval.retriever == "hybrid":
        if learned is not None:
            config = overrides.replace(config, {"retrieval.bm25_weight": float(f"{learned:.4g}")})
        beyond["the words of passages"] = {
            name: overrides.shown(overrides.value(config, name))
            for name in overrides.not_default(config)
            if name.startswith(("retrieval.retriever", "retrieval.fusion", "retrieval.bm25_"))}
    if reranker := config.model.reranker.pretrained:
        beyond["the reranker"] = {"model.reranker.pretrained": reranker}
    return beyond


def _folders(towers: list[str], architecture: Architecture, kind: str, family: str | None,
             path: pathlib.Path) -> list[tuple[str, str, str]]:
    """(place in the export, class, a tower that it holds) of each folder to write."""
    def family_of(tower: str) -> str:
        return families.class_of(architecture.generator) if tower == "generator" else (
            families.encoder_family(architecture.retriever, tower))

    fits = family_of("query_encoder") == "DPRQuestionEncoder"  # as RAG there has it, with BART
    together = {"query_encoder", "generator"} <= set(towers) and bool(
        family or kind in RAG_FAMILY and fits) and (
            family_of("generator") == "BartForConditionalGeneration")
    alone = [tower for tower in towers if not together or tower == "document_encoder"]
    folders = [(tower, family_of(tower), tower) for tower in alone]
    if together:
        folders.insert(0, (".", family or RAG_FAMILY[kind], "query_encoder"))
    elif len(towers) == 1:
        folders = [(".", family or family_of(*alone), *alone)]
    elif family:
        raise ConfigError(f"--family={family}: the towers of {path} do not go into one folder, and "
                          "each is written as its own class; leave --family out")
    return folders


def _as_written(retriever: BertConfig, params: dict[str, Any]) -> BertConfig:
    """The encoder's configuration in an export: a learned scale, which is removed from the
    parameters, becomes a fixed one, and the pooling of retrievers other than DPR's is named."""
    query_encoder = params.get("query_encoder", {})
    if rag.SCALE in query_encoder:
        learned = float(np.exp(np.float64(query_encoder.pop(rag.SCALE))))
        retriever = dataclasses.replace(retriever, scale=retriever.logit_scale * learned)
    named = pretrained.PLAIN not in params and (
        retriever.beyond_dpr or retriever.model_type != "bert")
    pooling = "cls" if named and retriever.pooling == "auto" else retriever.pooling
    return dataclasses.replace(retriever, pooling=pooling, learn_scale=False)


def _with_ends(generator: GeneratorConfig, config: Config, tokenizers: Mapping[str, Tokenizer]
               ) -> GeneratorConfig:
    """The generator with all tokens that end an answer in a chat, also that of the template."""
    if config.data.source_format != "chat" or "generator" not in tokenizers:
        return generator
    layout = generator_format(config, tokenizers["generator"])
    return dataclasses.replace(generator, end_tokens=end_tokens(generator, layout.tokenizer))


def _provenance(path: pathlib.Path, config: Config, run: str | None, base: dict[str, str],
                beyond: Beyond) -> Provenance:
    """The origin of a workdir's weights, for their model card."""
    names = ("passages", "train", "dev", "test") if run or config.train.steps else ()
    data = {name: getattr(config.data, name) for name in names if getattr(config.data, name)}
    if names and not config.data.passages:
        data = {"passages": "the world of countries that rag_jax ships"}
    reports = sorted(path.glob(f"{run}/evaluation/*/metrics.json")) if run else []
    return Provenance(run or "", base, data, {
        file.parent.name: read_object(file.parent, file.name) for file in reports}, beyond)


def _model(config: Config, tokenizers: dict[str, Tokenizer]) -> rag.RagModel:
    """The architecture, with the sizes of its token tables. Special tokens have no influence on the
    shapes, and stand-ins are given."""
    sizes = {}
    for tower, section in (("query_encoder", "retriever"), ("generator", "generator")):
        own = getattr(config.model, section)
        size = own.vocab_size or (tokenizers[tower].vocab_size if tower in tokenizers else 0)
        sizes[section] = dataclasses.replace(own, vocab_size=size, pretrained="")
    return rag.RagModel(sizes["retriever"], sizes["generator"], config.kind, 2, 2, 1,
                        lexical=config.retrieval.retriever == "bm25",
                        classes=config.head_classes, fusion=fusion_of(config))


def _params(path: pathlib.Path, config: Config, run: str | None, model: rag.RagModel, mesh: Mesh
            ) -> tuple[dict[str, Any], SpecialIds | None, str, dict[str, str]]:
    """(parameters by tower, special ids if a checkpoint has them, the kind of RAG, the sources of
    converted towers)."""
    if run:
        warn_of_unfinished(path / run, config.train.steps)
        params, _ = pretrained.restore_run(path / run, model, mesh)
        return params, None, config.kind, {}
    params, ids, kind, sources = {}, None, config.kind, {}
    for tower in (*rag.TOWERS, pretrained.PLAIN):
        try:
            pretrained.folder_of(path, tower)
        except ConfigError:
            continue
        params[tower], meta = pretrained.restore_tower(path, tower, model, mesh)
        ids = SpecialIds(**meta["ids"]) if meta.get("ids") else ids
        kind = KINDS.get(meta.get("family"), kind)
        sources |= {tower: meta["source"]} if meta.get("source") else {}
    if not params:
        raise ConfigError(f"{path}: no checkpoint to export")
    return params, ids, kind, sources
