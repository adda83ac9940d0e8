"""The document encoder of a run that leaves it as it is: RUN/document_encoder.

No step of such a run reads it, so neither the training state nor its checkpoints have it: it is
saved once, as step 0 of a folder of its own. Checkpoints of runs that earlier versions began have
it.
"""

import functools
import pathlib
from collections.abc import Callable

from jax.sharding import Mesh

from rag_jax import files, hosts
from rag_jax.models.rag import RagModel
from rag_jax.models.stack import unstack_layers
from rag_jax.training import step
from rag_jax.training.checkpoint import (
    NO_OPTIMISER,
    CheckpointDamaged,
    Checkpointer,
    CheckpointError,
)
from rag_jax.training.job import Job
from rag_jax.types import Params

TOWER = FOLDER = "document_encoder"


def is_apart(job: Job) -> bool:
    """Whether a run has its document encoder in a folder of its own.

    job: with the configuration of the run.
    """
    return TOWER in job.model.towers and job.config.train.document_encoder == "frozen"


def is_saved(run: pathlib.Path) -> bool:
    """Whether it is there, as process 0 sees it."""
    with Checkpointer(run / FOLDER, read_only=True) as checkpointer:
        return checkpointer.latest_step() is not None


def save(run: pathlib.Path, params: Params) -> None:
    """Saves it, {TOWER: ...}, in place of what an earlier attempt to begin the run has left."""
    hosts.lead(lambda: files.remove_folder(run / FOLDER))
    with Checkpointer(run / FOLDER) as checkpointer:
        checkpointer.save(0, params, NO_OPTIMISER, {})


def reader(job: Job, run: str) -> Callable[[], Params] | None:
    """A function that reads a run's document encoder, with looped layers, when it is first called:
    who only answers never needs it. None = the run has none.

    job: with the configuration of the run.
    """
    if TOWER not in job.model.towers:
        return None
    return functools.cache(
        lambda: unstack_layers(read(job.workdir / run, job.model, job.mesh))[TOWER])


def read(run: pathlib.Path, model: RagModel, mesh: Mesh) -> Params:
    """The document encoder of a run, {TOWER: ...}.

    Raises:
      CheckpointError: it is missing or damaged, and the message says what saves it anew.
    """
    anew = "run the training command again, which saves it anew"
    with Checkpointer(run / FOLDER, read_only=True) as checkpointer:
        if checkpointer.latest_step() is None:
            raise CheckpointError(f"{run / FOLDER}: the document encoder of this run is missing; "
                                  f"copy it back from elsewhere, or {anew}.")
        try:
            return checkpointer.restore_params(0, step.abstract_params(model, (TOWER,), mesh))[0]
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{error} Or remove {run / FOLDER} and {anew}.") from None
