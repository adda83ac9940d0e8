"""Opens the index that a run is asked with: finds it by name, checks it, and loads it."""

import pathlib

from rag_jax import files, hosts
from rag_jax.config import Config, ConfigError
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.steps import steps_taken
from rag_jax.training import indexing, on_device, pretrained
from rag_jax.training.job import Index, Job


def named_indexes(job: Job, run: str) -> tuple[pathlib.Path, list[str]]:
    """The folder of a run's indexes, and their names."""
    folders = job.workdir / "indexes"
    if job.model.lexical:
        folders = job.workdir / indexing.WORD_INDEXES
    elif job.config.train.document_encoder == "refresh":
        folders = job.workdir / run / "indexes"
    return folders, sorted(f.name for f in folders.glob("[!.]*") if f.is_dir())


def open_index(job: Job, run: str, named: str | None, answers: bool = True) -> Index:
    """Opens and checks an index. It is called before the parameters are read, which takes longer.

    Args:
      job, run: the run that is asked with it.
      named: its folder, or its name among the run's indexes; None = the one of the run's training.
      answers: whether a generator reads its passages; else they are only retrieved.

    Raises:
      ConfigError: there is no such index, it does not fit the run, or the processes have opened
        different ones.
    """
    if source := job.config.model.reranker.pretrained:
        pretrained.reranker(source)
    folders, names = named_indexes(job, run)
    if named is None:
        folder = folders / job.trains_with
    else:
        candidates = [f for f in (folders / named, pathlib.Path(named))
                      if named and files.can_exist(f) and f.is_dir()]
        if not candidates:
            raise ConfigError(f"index {named!r}: no such folder, and {folders} has "
                              f"{', '.join(names) or 'none'}")
        folder = candidates[0]
    try:
        opened = indexing.open_host_index(folder.absolute(), job.model.lexical)
    except RetrievalError:
        if named is None:  # training that was cut short has none yet
            pretrained.check_trained(job.workdir / run)
            taken, steps = steps_taken(job.workdir / run), job.config.train.steps
            if job.config.train.document_encoder == "refresh" and taken < steps:
                raise ConfigError(
                    f"{job.workdir / run}: has taken {taken} of {steps} steps, and its index is "
                    "made after the last; wait for that, or give the command that trains it again"
                    ) from None
        raise
    hosts.check_same_content(f"the index {folder.name}", opened.manifest)
    check_k(job.config, opened, folder)
    if answers:
        indexing.check_tokens(opened, job.prepared)
    return indexing.with_words(job, opened)


def check_k(config: Config, index: Index, folder: pathlib.Path | None = None) -> None:
    """Raises ConfigError where config.eval.k asks for more passages than there are."""
    k = config.eval.k
    if k > index.size:
        opened = f", in Python by load(config={{'eval.k': {index.size}}})" if folder else ""
        raise ConfigError(f"config.eval.k={k}: {folder or 'the index'} has {index.size} passages; "
                          f"set config.eval.k={index.size} or less{opened}")


def placed(job: Job, index: Index | None) -> Index | None:
    """The index, loaded onto the devices where `config.retrieval.where` says so."""
    if index is None or job.model.lexical:
        return index
    return on_device.open_index(job.config, job.prepared.format, job.mesh, index)
