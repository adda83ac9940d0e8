"""Parameters to start from, in the sources that `config.model.sources` names, and those of runs.

A source is a checkpoint of Hugging Face or a workdir: of `rag_jax.train`, or one that
`rag_jax.convert` made of a checkpoint.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rag_jax import files, hosts, parallel
from rag_jax.config import (
    BartConfig,
    BertConfig,
    Config,
    ConfigError,
    DataConfig,
    EvalConfig,
    overrides,
    rules,
)
from rag_jax.data.inputs import is_prepared
from rag_jax.hub import config_json, families, generator_inputs
from rag_jax.hub import load as hub
from rag_jax.models import rag
from rag_jax.models.generator import in_dtype
from rag_jax.models.stack import unstack_layers
from rag_jax.retrieval.verification import open_digests
from rag_jax.steps import steps_taken, warn_of_unfinished
from rag_jax.training import document_encoder, step, workdir
from rag_jax.training.checkpoint import BEST_METRIC, Checkpointer
from rag_jax.training.job import Job

ENCODERS = ("query_encoder", "document_encoder")
PLAIN = "bert"  # a BERT that is no retriever: both encoders start from it
# Fields of how a tower is computed and trained; all others are its architecture.
RUNTIME = ("pretrained", "dropout", "attention_dropout", "activation_dropout", "dtype",
           "param_dtype", "remat", "fused_attention", "scan_layers", "position_init", "init_std",
           "logit_chunk")
# Fields that an encoder's folder sets where the configuration does not.
OPEN = ("pooling", "normalize", "scale", "query_prefix", "passage_prefix", "titles")
FORCED = ("forced_bos", "forced_eos")


def _runtime(tower: BertConfig | BartConfig) -> dict[str, Any]:
    return {name: getattr(tower, name) for name in RUNTIME if hasattr(tower, name)}


def described(source: str) -> hub.Pretrained:
    """Describes a source, a workdir or a checkpoint of Hugging Face, without its parameters."""
    path = pathlib.Path(source)
    return _workdir(path) if workdir.exists(source) else _checkpoint(source, files.stamp(path))


@functools.cache
def _checkpoint(source: str, stamp: str) -> hub.Pretrained:
    """stamp: of the folder, whose content may change; "" = a name on the hub."""
    del stamp
    return hub.describe(source)


def _workdir(path: pathlib.Path) -> hub.Pretrained:
    saved, plain = workdir.read(path), (path / PLAIN).is_dir()
    sentences = (saved.model.retriever.pooling != "auto" and not saved.train.steps
                 and not is_prepared(path))  # `convert` has written a sentence encoder
    search = {name: getattr(saved.eval, name) for name in (*config_json.SEARCH, *FORCED)}
    if saved.train.steps:  # then config.eval is how its training was evaluated
        search = {}
    else:
        search["max_length"] = saved.data.max_target_length
    return hub.Pretrained(
        saved.model.retriever, saved.model.generator, family="workdir",
        longest=saved.data.max_passage_length if sentences else 0,
        towers=(*rag.TOWERS, PLAIN) if plain else rag.TOWERS,
        inputs=generator_inputs.read_as(saved.data),
        search=search,
        tokenizers={"query_encoder": path / "data" / "retriever_tokenizer",
                    "generator": path / "data" / "generator_tokenizer"})


def _architecture(source: str, tower: str) -> BertConfig | BartConfig:
    """The architecture of a tower in a source.

    Raises:
      ConfigError: the source has no such tower.
    """
    description = described(source)
    if tower not in description.towers and not (PLAIN in description.towers and tower in ENCODERS):
        raise ConfigError(f"config.model: {source!r} is a {description.family} with "
                          f"{', '.join(description.towers)}; it has no {tower}")
    if workdir.exists(source):
        folder_of_source(source, tower)
    return description.generator if tower == "generator" else description.retriever


def reranker(source: str) -> hub.Pretrained:
    """Describes a cross-encoder; reads headers only.

    Raises:
      ConfigError: the source is no cross-encoder.
    """
    named = f"config.model.reranker.pretrained={source!r}"
    known = [name for name, family in families.FAMILIES.items()
             if families.RERANKER in family.places]
    if workdir.exists(source):
        raise ConfigError(f"{named}: a workdir, which holds no cross-encoder; name a checkpoint "
                          f"of Hugging Face, one of {', '.join(known)}")
    description = described(source)
    if families.RERANKER not in description.towers:
        raise ConfigError(f"{named}: a {description.family}, which is no cross-encoder; these are "
                          f"{', '.join(known)}")
    return description


def resolve(config: Config) -> Config:
    """The configuration with the architecture of pretrained towers, and dropout rates, filled in.
    Passages are no longer than the positions of the encoders, unless config.data sets a length. All
    processes call it alike.

    Raises:
      ConfigError: a source lacks the tower, the reranker is no cross-encoder, the encoders have
        different architectures, or a length exceeds the positions of the model; or processes have
        different files of a source.
    """
    resolved = hosts.each(lambda: _resolved(config))
    hosts.check_same(overrides.texts(resolved))
    return resolved


def _resolved(config: Config) -> Config:
    model, sources = config.model, config.model.sources
    if model.reranker.pretrained:
        reranker(model.reranker.pretrained)
    if overrides.lexical(config):  # a RAG checkpoint's question encoder is not read
        sources = {tower: source for tower, source in sources.items() if tower not in ENCODERS}
    architectures = {tower: _architecture(source, tower) for tower, source in sources.items()}
    encoders = [architectures[tower] for tower in ENCODERS if tower in architectures]

    def kept(own: Any, other: Any) -> Any:
        own = overrides.in_family(own, getattr(other, "family", None))
        return dataclasses.replace(other, **_runtime(own))

    if encoders:
        own = model.retriever
        set_here = {name: value for name in OPEN
                    if (value := getattr(own, name)) not in (None, "auto")}
        learn = own.learn_scale or any(encoder.learn_scale for encoder in encoders)
        retriever, other = (dataclasses.replace(kept(own, encoder), learn_scale=learn, **set_here)
                            for encoder in encoders)
        if retriever != other:
            differ = [f.name for f in dataclasses.fields(retriever)
                      if getattr(retriever, f.name) != getattr(other, f.name)]
            raise ConfigError(
                f"config.model: {sources['query_encoder']!r} and {sources['document_encoder']!r} "
                f"differ in {', '.join(differ)}; the two encoders need one architecture")
        model = dataclasses.replace(model, retriever=retriever)
    if "generator" in architectures:
        generator = kept(model.generator, architectures["generator"])
        if model.generator.start_token >= 0:
            generator = dataclasses.replace(generator, start_token=model.generator.start_token)
        if model.generator.end_tokens:
            generator = dataclasses.replace(generator, end_tokens=model.generator.end_tokens)
        model = dataclasses.replace(model, generator=generator)
    inputs = dict(generator_inputs.OUR_INPUTS)
    if "generator" in sources:
        inputs |= described(sources["generator"]).inputs
    elif model.generator.family == "causal":  # as of a checkpoint without a chat template
        inputs["source_format"] = "prompt"
    if config.data.source_format not in ("auto", inputs["source_format"]):
        inputs.pop("prompt", None)  # it belongs to the other format
    left_open = {name: value for name, value in inputs.items()
                 if getattr(config.data, name) in ("auto", "")}
    if encoders and config.data.max_passage_length == DataConfig().max_passage_length:  # not set
        left_open["max_passage_length"] = min(
            config.data.max_passage_length, model.retriever.max_positions)
    data = dataclasses.replace(config.data, **left_open)
    config = overrides.usual_rates(dataclasses.replace(config, data=data, model=model))
    return rules.validate(_generating_as(config, sources.get("generator")), resolved=True)


def _generating_as(config: Config, source: str | None) -> Config:
    """The configuration with the generation settings of the generator's checkpoint in the fields
    that are not set; unchanged where the generator is trained further."""
    if config.train.steps or not source:
        return config
    settings, longest = generation_settings(described(source)), config.data.max_target_length
    if "max_length" in settings and longest == DataConfig().max_target_length and (
            not config.eval.labels):
        longest = min(settings["max_length"], config.model.generator.max_positions)
    data = dataclasses.replace(config.data, max_target_length=longest)
    return with_generation_defaults(
        dataclasses.replace(config, data=data), generation_defaults(config, source))


def generation_defaults(config: Config, source: str | None) -> dict[str, Any]:
    """The generation settings of a generator's checkpoint for those fields of config.eval that are
    None; {} if the generator is trained further."""
    if config.train.steps or not source:
        return {}
    return {name: value for name, value in generation_settings(described(source)).items()
            if name != "max_length" and getattr(config.eval, name) is None}


def with_generation_defaults(config: Config, defaults: Mapping[str, Any]) -> Config:
    """The configuration with `generation_defaults` in the fields of config.eval that are None,
    except where other fields rule a default out or give it another meaning."""
    asked, unfit = config.eval, set()
    unfit |= {"forced_bos"} if asked.prefix or asked.labels else set()
    unfit |= set(config_json.SEARCH) if asked.labels else set()
    unfit |= {"forced_eos", "length_penalty"} if asked.exact_nodes else set()
    unfit |= {"length_penalty"} if asked.strategy != "marginal" else set()
    unfit |= {"min_length"} if (defaults.get("min_length") or 0) > (
        config.data.max_target_length) else set()
    return dataclasses.replace(config, eval=dataclasses.replace(asked, **{
        name: value for name, value in defaults.items()
        if name not in unfit and getattr(asked, name) is None}))


def generation_settings(description: hub.Pretrained) -> dict[str, Any]:
    """The fields of config.eval, and max_length, that the files of a checkpoint set."""
    forced, ids = {}, description.ids
    if ids:
        forced = {"forced_bos": ids.forced_bos is not None and ids.forced_bos == ids.bos,
                  "forced_eos": ids.forced_eos == ids.end}
    return {**forced, **description.search}


def length_notes(resolved: Config) -> list[str]:
    """A note where passages may be longer than the folder of their encoder says that it reads. It
    is no limit, so that earlier indexes with longer passages still fit."""
    source = resolved.model.sources.get("document_encoder")
    if source is None or overrides.lexical(resolved):
        return []
    longest, read = described(source).longest, resolved.data.max_passage_length
    return [f"config.data.max_passage_length={read}: {source} says that it reads {longest} tokens "
            f"of a text; set {longest} for vectors as sentence-transformers gives them"
            ] if 0 < longest < read else []


def warn_of_unfinished_sources(config: Config) -> None:
    """Warns of workdirs among the sources whose warm-up has not come to its end."""
    for source, stage in dict.fromkeys(
            (source, "generator" if tower == "generator" else "retriever")
            for tower, source in config.model.sources.items() if workdir.exists(source)):
        path = pathlib.Path(source)
        if is_prepared(path):  # what `convert` writes has no data
            warn_of_unfinished(
                path / stage, getattr(workdir.read(path), f"{stage}_warmup").steps,
                ", and what starts from it starts from there")


def notes(asked: Config, resolved: Config) -> list[str]:
    """The fields that `resolve` set beside the architecture, a warning about encoders that were not
    trained together, workdirs whose runs were trained further, and `length_notes`."""
    lines = length_notes(resolved)
    sources = asked.model.sources
    for path in map(pathlib.Path, dict.fromkeys(sources.values())):
        if workdir.exists(path) and (runs := _trained_runs(path)):
            lines.append(f"{path}: its towers are those from before {' and '.join(runs)} trained; "
                         f"for what a run trained, name a folder that rag_jax.convert --from {path}"
                         " wrote")
    if (longest := resolved.data.max_passage_length) != asked.data.max_passage_length:
        lines.append(f"{sources['document_encoder']}: config.data.max_passage_length={longest}, as "
                     "it has no more positions")
    changed = [f"config.data.{name}={getattr(resolved.data, name)}"
               for name, usual in {**generator_inputs.OUR_INPUTS, "prompt": ""}.items()
               if getattr(asked.data, name) in ("auto", "")
               and getattr(resolved.data, name) != usual]
    if changed and "generator" in sources:
        lines.append(f"{sources['generator']}: {' and '.join(changed)}, as it was trained; set "
                     "them yourself for another form")
    changed = [f"config.eval.{f.name}={now}" for f in dataclasses.fields(EvalConfig)
               if (now := getattr(resolved.eval, f.name)) and getattr(asked.eval, f.name) is None]
    if (longest := resolved.data.max_target_length) != asked.data.max_target_length:
        changed.append(f"config.data.max_target_length={longest}")
    if changed:
        lines.append(f"{sources['generator']}: {', '.join(changed)}, as it says; set them yourself "
                     "for others")
    origins = {tower: families.origin(sources[tower])
               or described(sources[tower]).origins.get(tower) for tower in ENCODERS
               if tower in sources and not workdir.exists(sources[tower])}
    if len(set(origins.values()) - {None}) > 1:
        lines.append(
            "warning: the query encoder comes from DPR's "
            f"{origins['query_encoder']} ({sources['query_encoder']}), the document encoder from "
            f"{origins['document_encoder']} ({sources['document_encoder']}). Encoders that were "
            "not trained together give meaningless scores; name a pair")
    return lines


def tokenizer_folder(config: Config, tower: str, required: bool = True) -> pathlib.Path | None:
    """The folder of the tokenizer of a tower's source; None = the tower has no source, or it is not
    read and its source has no tokenizer.

    Args:
      config: names the sources.
      tower: "query_encoder" or "generator".
      required: False = a source without a tokenizer gives None, as the workdir has one already.

    Raises:
      ConfigError: the source has no tokenizer, by which alone its token table can be read.
    """
    source = config.model.sources.get(tower)
    if not source:
        return None
    folders = described(source).tokenizers
    folder = folders.get(tower, folders.get(PLAIN))
    if folder is None and required and not (tower in ENCODERS and overrides.lexical(config)):
        section = "generator" if tower == "generator" else "retriever"
        raise ConfigError(f"{source} has no tokenizer; name one with "
                          f"config.data.{section}_tokenizer")
    digests = open_digests(folder.parent) if workdir.exists(source) else None
    if digests is not None:
        digests.check_all(file for file in digests.names if file.startswith(f"{folder.name}/"))
    return folder


def is_retriever(config: Config) -> bool:
    """Whether both encoders come from retrievers, so that they need no warm-up."""
    def ranks(source: str) -> bool:
        description = described(source)
        return PLAIN not in description.towers or description.retriever.pooling != "auto"

    sources = config.model.sources
    return all(tower in sources and ranks(sources[tower]) for tower in ENCODERS)


def check_retriever(config: Config) -> None:
    """Raises ConfigError for encoders that are not trained where neither their folders nor the
    configuration, before it is resolved, say how their states become vectors."""
    if config.model.retriever.pooling == "auto" and not is_retriever(config):
        raise ConfigError(f"{config.model.sources['document_encoder']} is no retriever: nothing "
                          "says how its states become vectors that find passages. Name a sentence "
                          "encoder (sentence-transformers/all-MiniLM-L6-v2, ...), or set "
                          "config.model.retriever.pooling=mean or cls")


def load(job: Job, towers: Sequence[str], answers: bool = False) -> dict[str, Any]:
    """Parameters of towers, each from its source, placed by the table of sharding rules.

    Args:
      job: its configuration is resolved.
      towers: their names; each has a source.
      answers: whether they only answer: the generator's matrices then have its param_dtype.
    """
    loaded: dict[str, Any] = {}
    params = {}
    for tower in towers:
        source = job.config.model.sources[tower]
        if workdir.exists(source):
            params[tower] = _load_from_workdir(job, tower, source)
            continue
        if source not in loaded:
            model = job.config.model
            wanted = [t for t in towers if model.sources[t] == source]
            loaded[source] = hub.load(
                source, mesh=job.mesh, towers=[*wanted, PLAIN],
                retriever=_runtime(model.retriever), generator=_runtime(model.generator) | (
                    {} if answers else {"param_dtype": "float32"}))
        found = loaded[source].params
        params[tower] = found[tower] if tower in found else found[PLAIN]
    if job.model.retriever.learn_scale and "query_encoder" in params:
        one = jax.device_put(jnp.zeros(()), parallel.replicated(job.mesh))
        params["query_encoder"] = {rag.SCALE: one, **params["query_encoder"]}
    if answers and "generator" in params:
        params["generator"] = in_dtype(
            params["generator"], job.config.model.generator.param_dtype)
    return params


def _load_from_workdir(job: Job, tower: str, source: str) -> Any:
    """Parameters of a tower of a workdir, as it was before fine-tuning.

    Raises:
      ConfigError: it was trained with another scan_layers, or there is no such tower.
    """
    description = described(source)
    section = "retriever" if tower in ENCODERS else "generator"
    scans = getattr(description, section).scan_layers
    if getattr(job.config.model, section).scan_layers != scans:
        raise ConfigError(f"{source}: its {section} was trained with scan_layers={scans}; "
                          f"set config.model.{section}.scan_layers={scans}")
    model = dataclasses.replace(job.model, retriever=dataclasses.replace(
        job.model.retriever, learn_scale=description.retriever.learn_scale))
    return restore_tower(pathlib.Path(source), _stored(source, tower), model, job.mesh)[0]


def _stored(source: str, tower: str) -> str:
    """The name by which a workdir has a tower."""
    return PLAIN if PLAIN in described(source).towers and tower in ENCODERS else tower


def folder_of_source(source: str, tower: str) -> tuple[pathlib.Path, tuple[str, ...]]:
    """`folder_of` what a tower starts from, in a workdir that is its source."""
    return folder_of(pathlib.Path(source), _stored(source, tower))


def folder_of(path: pathlib.Path, tower: str) -> tuple[pathlib.Path, tuple[str, ...]]:
    """The folder of a workdir with a tower as it was before fine-tuning, and the towers in it.

    Raises:
      ConfigError: there is no such folder.
    """
    places = {path / tower: ("query_encoder" if tower == PLAIN else tower,)}
    if tower in ENCODERS:
        places[path / "retriever"] = ENCODERS
    for folder, towers in places.items():
        if folder.is_dir():
            return folder, towers
    told = (f"{path}: no checkpoint of the {tower}, not in "
            f"{' nor in '.join(f'{folder.name}/' for folder in places)}")
    if own := workdir.read(path).model.sources.get(tower):
        told += f", as it began with that of {own}: name {own}"
    if _trained_runs(path):
        told += f", or, for what a run trained, a folder that rag_jax.convert --from {path} wrote"
    raise ConfigError(told)


def _trained_runs(path: pathlib.Path) -> list[str]:
    """The runs of a workdir that have taken training steps."""
    return [run for run in workdir.read(path).runs if steps_taken(path / run)]


def restore_tower(path: pathlib.Path, tower: str, model: rag.RagModel, mesh: Mesh
                  ) -> tuple[Any, dict[str, Any]]:
    """(parameters, meta) of one tower of a workdir, as it was before fine-tuning."""
    folder, towers = folder_of(path, tower)
    params, meta = restore_towers(folder, towers, model, mesh)
    return params[towers[0] if tower == PLAIN else tower], meta


def load_params(job: Job, run: str, step_number: int | None = None) -> tuple[Any, dict]:
    """(parameters with looped layers, meta) of a run's best checkpoint, or of a given step, without
    a document encoder that is saved apart (`document_encoder.reader`); the generator's matrices in
    its param_dtype.

    job: with the configuration of the run.
    """
    if step_number is None:
        warn_of_unfinished(job.workdir / run, job.config.train.steps)
    params, meta = restore_towers(job.workdir / run, job.model.towers, job.model, job.mesh,
                                  step_number, (document_encoder.TOWER,))
    params["generator"] = in_dtype(params["generator"], job.model.generator.param_dtype)
    return unstack_layers(params), meta


def restore_run(directory: pathlib.Path, model: rag.RagModel, mesh: Mesh) -> tuple[Any, dict]:
    """(parameters of all towers, meta) of a run's best checkpoint.

    Raises: as `restore_towers`.
    """
    params, meta = restore_towers(
        directory, model.towers, model, mesh, apart=(document_encoder.TOWER,))
    if set(model.towers) - params.keys():
        params |= document_encoder.read(directory, model, mesh)
    return params, meta


def restore_towers(directory: pathlib.Path, towers: Sequence[str], model: rag.RagModel, mesh: Mesh,
                   step_number: int | None = None, apart: Sequence[str] = ()
                   ) -> tuple[Any, dict]:
    """(parameters, meta) of the best checkpoint of a stage, or of a given step.

    Args:
      directory: of the stage.
      towers: that it trains.
      model, mesh: of the job.
      step_number: None = the best.
      apart: those of the towers that the checkpoint may lack.

    Raises:
      ConfigError: there is no checkpoint.
    """
    abstract = step.abstract_params(model, towers, mesh)
    with Checkpointer(directory, best_metric=BEST_METRIC, apart=apart, read_only=True
                      ) as checkpointer:
        if step_number is not None:
            return checkpointer.restore_params(step_number, abstract)
        if (restored := checkpointer.restore_best(abstract)) is None:
            raise _not_trained(directory)
        return restored[1:]


def check_trained(directory: pathlib.Path) -> None:
    """Raises a ConfigError where a run has no checkpoint."""
    with Checkpointer(directory, best_metric=BEST_METRIC, read_only=True) as checkpointer:
        if checkpointer.latest_step() is None:
            raise _not_trained(directory)


def _not_trained(directory: pathlib.Path) -> ConfigError:
    return ConfigError(f"{directory}: no checkpoint; train first, or go on, with the command that "
                       f"began {directory.parent}, and all its fields")
