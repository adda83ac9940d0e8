"""Checkpoints on disk: saved in the background, committed by rename, verified when restored.

A checkpoint is a directory `<directory>/<step>` with three Orbax items, `params`, `opt_state` and
`meta` (JSON), so that answering reads the parameters without the optimiser state. `meta` holds the
caller's dictionary, the step's metrics, by which of them the best step is chosen, and the name,
shape, dtype and digest of every stored array. Orbax stores no checksum of the array bytes, so a
flipped byte on disk would otherwise come back as a slightly different model.

A step is published and removed by a rename, so a step that lacks a part is damaged. A damaged step
is always reported and never removed: a reader takes the next best step, and a writer renames the
damaged one to damaged-STEP. A step that the machine could not read, for example because it was
short of memory, is not damaged, and the read ends with an error.

Random keys are not stored: every key in this project is a function of (seed, step).
"""

import contextlib
import functools
import json
import os
import pathlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rag_jax import files, hosts, locks, process
from rag_jax.errors import UserError, first_of
from rag_jax.retrieval.json_files import refuse_links
from rag_jax.steps import steps_in
from rag_jax.training import orbax_errors, orbax_noise, tree_record
from rag_jax.training.ranking import Ranking

PyTree = Any

# Names of the metric that chooses the best checkpoint; older steps have EM and no score.
BEST_METRIC = ("score", "em")
# The optimiser state of parameters that do not train: Orbax stores no empty tree.
NO_OPTIMISER = {"count": np.zeros((), np.int32)}
_ITEMS = ("params", "opt_state", "meta")
_PARAMS_ITEMS = ("params", "meta")  # all that answering reads
_UNFINISHED = "*.orbax-checkpoint-tmp*"  # Orbax's names of unfinished saves
_KINDS = {"params": "parameter", "opt_state": "optimiser array"}
_saving = threading.RLock()  # on CPUs, one thread at a time: Orbax mixes up what two of them save


class CheckpointError(UserError, RuntimeError):
    """A checkpoint could not be saved or restored; the message says which and what to do."""


class CheckpointDamaged(CheckpointError):
    """A part of a step is missing or has changed, or its parameters are not finite."""


class CheckpointMismatch(CheckpointError):
    """A sound checkpoint does not fit the model or optimiser that asks for it."""


class _NotRead(Exception):
    """A step may be sound, and yet this process does not read it; the text says why."""


class Checkpointer(contextlib.AbstractContextManager):
    """Saves and restores (params, opt_state, meta) by step, keeping the latest and the best.

    Every method is called by all processes alike; the directory is shared between them.

    Orbax's CheckpointManager is not used: damage to one step keeps it from opening any, and it
    counts an empty directory with a high number as the latest step.

    Args:
      directory: of the steps.
      keep: how many of the latest steps stay on disk, at least 1, beside the best step by
        `best_metric`. Others are removed when a later one is complete.
      best_metric: names of metrics, as for `Ranking`; each step stores them. () keeps the latest
        steps only.
      measured: the settings by which the scores of steps to save are measured; each step stores
        them, and scores of different settings are not compared. None = not known.
      apart: top-level names of the parameters that a step may lack, as they may be saved apart: it
        is then restored without them.
      read_only: for readers of a directory in which a training run may be writing: creates
        nothing, and leaves unfinished saves alone, which a writer removes when it starts.

    Raises:
      ValueError: when keep is below 1.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int = 2,
                 best_metric: Sequence[str] = (), measured: Mapping[str, str] | None = None,
                 apart: Sequence[str] = (), read_only: bool = False):
        import orbax.checkpoint as ocp

        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint; use keep=1 or more.")
        self.directory = pathlib.Path(directory).absolute()  # Orbax refuses relative paths
        self._keep, self._apart, self._read_only = keep, apart, read_only
        self._ranking, self._measured = Ranking(best_metric), measured
        self._ocp, self._args = ocp, ocp.args
        self._reader = ocp.Checkpointer(self._handler())
        self._writer: ocp.AsyncCheckpointer | None = None  # of the save under way
        self._damage: dict[int, CheckpointDamaged] = {}  # that a reader has met; writers rename it
        if not read_only:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove(self.directory.glob(_UNFINISHED))
        self._survey()

    def __exit__(self, *exc_info) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the save under way and releases the background threads."""
        try:
            self.wait()
        finally:
            self._reader.close()

    def _handler(self, **settings: int) -> Any:
        """Orbax's handler of the three items.

        settings: Orbax's, of the items with arrays.
        """
        arrays = self._ocp.StandardCheckpointHandler
        return self._ocp.CompositeCheckpointHandler(
            params=arrays(**settings), opt_state=arrays(**settings),
            meta=self._ocp.JsonCheckpointHandler())

    # Saving.

    def save(self, step: int, params: PyTree, opt_state: PyTree, meta: Mapping[str, Any],
             metrics: Mapping[str, float] | None = None) -> None:
        """Saves one step. Returns once the arrays are copied, and writes in the background; on
        CPUs, where copies would take as much memory again, returns once they are written.

        Args:
          step: number of finished training steps; a step is saved once.
          params: pytree of arrays, any dtype and sharding.
          opt_state: pytree of arrays.
          meta: what else the run needs to continue; must survive JSON.
          metrics: scores of this step; must contain one of `best_metric` when any is set and
            scores are given. NaN is never the best.

        Raises:
          CheckpointError: when the previous save failed in the background, or the step exists.
          ValueError: when `meta` is no JSON, a leaf is no array, or `best_metric` is absent.
        """
        if self._read_only:
            raise CheckpointError(
                f"{self.directory} was opened read-only; nothing can change there."
            )
        content = _content(step, params, opt_state, meta, metrics)
        self._ranking.note(step, content["metrics"], measured=self._measured)
        content["best_metric"] = list(self._ranking.best_metric)
        content["measured"] = self._measured and dict(self._measured)
        self.wait()
        if step in self._numbered():
            raise CheckpointError(f"Checkpoint step {step} exists already in {self.directory}.")
        self._remove([self._folder(step)])  # an empty folder may have that name
        args = self._args
        orbax_noise.drop_orphans()
        near, limit = jax.default_backend() == "cpu", {}
        if near:  # the compressed arrays are in the same memory as the state
            largest = max(x.nbytes for x in jax.tree.leaves([params, opt_state]))
            limit = {"save_concurrent_gb": 1 + largest // 10**9}
        items = args.Composite(
            params=args.StandardSave(params), opt_state=args.StandardSave(opt_state),
            meta=args.JsonSave({"crc32": _crc32(content), "content": content}))
        with _saving if near else contextlib.nullcontext():
            with self._report_failed_save(OSError), contextlib.ExitStack() as unless_begun:
                writer = self._ocp.AsyncCheckpointer(self._handler(**limit))
                unless_begun.callback(writer.close)
                writer.save(self._folder(step), args=items)
                unless_begun.pop_all()
            self._writer = writer
            if near:
                self.wait()
                process.give_back_memory()  # of the compressed arrays

    def wait(self) -> None:
        """Blocks until no save is under way; raises CheckpointError if one has failed."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        with self._report_failed_save(Exception), contextlib.closing(writer):
            writer.wait_until_finished()
        steps = self._complete()
        kept = {*steps[-self._keep :], self._ranking.best(steps)}
        self._remove(self._folder(step) for step in steps if step not in kept)

    def _remove(self, paths: Iterable[pathlib.Path]) -> None:
        """Removes folders that exist, each as a whole: half a step would be read as a damaged one.

        The other processes do not wait: all of them ask process 0 which steps exist.
        """
        if hosts.leads():
            for path in paths:
                files.remove_folder(path)

    def _set_aside(self, step: int, damage: CheckpointDamaged) -> None:
        """Renames a damaged step to damaged-STEP, which is no step's name, and prints a warning."""
        def rename() -> None:
            kept = files.set_aside(self._folder(step), "damaged")
            hosts.warn(f"{damage} It is kept as {kept}.")

        hosts.lead(rename)
        self._ranking.drop(step)

    @contextlib.contextmanager
    def _report_failed_save(self, kind: type[Exception]) -> Iterator[None]:
        try:
            yield
        except kind as error:
            self._remove(self.directory.glob(_UNFINISHED))  # makes room on a full disk
            cause = orbax_errors.of_system(error)
            advice = "check the free space, permissions and limits of file sizes there"
            if hosts.count() > 1 and orbax_errors.is_vain_wait(error):
                advice = f"another process of the job is gone, or the network: {hosts.START_AGAIN}"
            raise CheckpointError(f"Saving a checkpoint to {self.directory} failed ({cause}); "
                                  f"{advice}. Earlier checkpoints are untouched.") from error

    # Listing steps.

    def all_steps(self) -> list[int]:
        """Steps that are complete on disk, ascending, as process 0 sees them: other hosts may see a
        new one later. Waits for a save under way."""
        self.wait()
        return hosts.exchange(self._complete())[0]

    def latest_step(self) -> int | None:
        """The last complete step, or None."""
        return max(self.all_steps(), default=None)

    def latest_here(self) -> int | None:
        """`latest_step` as this process sees it: the others need not call it, so that an error that
        not all of them meet can name it."""
        self.wait()
        return max(self._complete(), default=None)

    def best_step(self) -> int | None:
        """The complete step with the highest `best_metric` (ties: the later), or None."""
        return self._ranking.best(self.all_steps())

    def _survey(self) -> None:
        """Reads the scores of all steps; a damaged step does not hide the others."""
        self._ranking.clear()
        self._damage.clear()
        for step in self._numbered():
            try:
                content = self._read_content(step, _PARAMS_ITEMS if self._read_only else _ITEMS)
                self._ranking.note(step, content["metrics"],
                                   content.get("best_metric") or BEST_METRIC,  # of older steps
                                   content.get("measured"))
            except CheckpointDamaged as error:
                if not self._read_only:
                    self._set_aside(step, error)
                elif self._is_there(step):
                    self._damage[step] = error

    def _folder(self, step: int) -> pathlib.Path:
        return self.directory / str(step)

    def _steps(self) -> list[int]:
        """Steps whose folders are not empty, ascending, damaged ones too."""
        return [step for step in steps_in(self.directory)
                if _has_content(self._folder(step))]

    def _complete(self) -> list[int]:
        """The complete ones of `_steps`."""
        return [step for step in self._steps() if self._is_complete(step)]

    def _numbered(self) -> list[int]:
        """`_steps` as process 0 sees them."""
        self.wait()
        return hosts.exchange(self._steps())[0]

    def _is_there(self, step: int) -> bool:
        """Whether a step still exists: a training run may remove it while another process reads."""
        self.wait()
        return hosts.exchange(self._folder(step).exists())[0]

    def _is_complete(self, step: int, items: Sequence[str] = _ITEMS) -> bool:
        return all((self._folder(step) / item).exists() for item in items)

    # Restoring.

    def restore(self, step: int, abstract_params: PyTree, abstract_opt_state: PyTree
               ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        """Restores everything of one step, bit for bit.

        Args:
          step: one of `all_steps()`.
          abstract_params: pytree of jax.ShapeDtypeStruct; each array is placed on the sharding
            given there (None: the first local device), from whatever devices it was saved.
          abstract_opt_state: the same for the optimiser state.

        Returns:
          (params, opt_state, meta).

        Raises:
          CheckpointMismatch: names, shapes or dtypes differ; found before any array is read.
          CheckpointDamaged: the step is damaged.
          CheckpointError: the step is absent, or the machine could not read it.
        """
        trees = {"params": abstract_params, "opt_state": abstract_opt_state}
        restored, meta = self._restore(step, trees, compare_dtypes=True)
        return restored["params"], restored["opt_state"], meta

    def restore_params(self, step: int, abstract_params: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Restores (params, meta) of one step and leaves the optimiser state on disk.

        As `restore`, but a dtype in `abstract_params` other than the stored one is no mismatch:
        the parameters are cast to it after they are verified.
        """
        trees = {"params": abstract_params}
        restored, meta = self._restore(step, trees, compare_dtypes=False)
        params = restored["params"]
        if self._apart:
            abstract_params = {name: abstract_params[name] for name in params}
        return jax.tree.map(
            lambda leaf, wanted: leaf.astype(wanted.dtype), params, abstract_params), meta

    def restore_latest(self, abstract_params: PyTree, *abstract_opt_states: PyTree
                      ) -> tuple[int, PyTree, PyTree, dict[str, Any]] | None:
        """The last sound step, to continue from: (step, params, opt_state, meta); None = no step.

        Damaged steps after it are set aside with a warning. Arguments and errors as in `restore`;
        of several forms of the optimiser state, the first that fits is taken.
        """
        damaged = False
        for step in reversed(self._numbered()):
            try:
                restored = self._restore_first(step, abstract_params, *abstract_opt_states)
            except CheckpointDamaged as error:
                self._set_aside(step, error)
                damaged = True
                continue
            if damaged:
                hosts.warn(f"going on from step {step}, the last sound one in {self.directory}.")
            return step, *restored
        if damaged:
            hosts.warn(f"no sound step is left in {self.directory}: beginning again at step 0.")
        return None

    def _restore_first(self, step: int, abstract_params: PyTree, *forms: PyTree
                      ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        mismatches = []
        for form in forms:
            try:
                return self.restore(step, abstract_params, form)
            except CheckpointMismatch as error:
                mismatches.append(str(error))
        raise CheckpointMismatch(
            "\nRead in another form of the optimiser's state:\n".join(mismatches))

    def restore_best(self, abstract_params: PyTree) -> tuple[int, PyTree, dict[str, Any]] | None:
        """(step, params, meta) of the best step by `best_metric`, else the latest; None = no step.

        A warning names each damaged step that is better, or that may be, as its scores cannot be
        read, and the step taken in its place. Arguments as in `restore_params`.

        Raises:
          CheckpointMismatch: as in `restore`.
          CheckpointDamaged: no step is sound.
          CheckpointError: the machine could not read a step that may be sound.
        """
        damage = list(self._damage.values())
        steps = [step for step in self._numbered() if step not in self._damage]
        while steps:
            step = self._ranking.best(steps)
            step = max(steps) if step is None else step
            steps.remove(step)
            try:
                params, meta = self.restore_params(step, abstract_params)
            except CheckpointError as error:
                if not self._is_there(step):
                    self._survey()
                    return self.restore_best(abstract_params)
                if not isinstance(error, CheckpointDamaged):
                    raise
                damage.append(error)
                continue
            for error in damage:
                hosts.warn(f"{error} Taking step {step} in its place.")
            return step, params, meta
        if damage:
            raise damage[-1]
        return None

    def verify(self, step: int) -> None:
        """Reads all of one step and compares it with its digests, without knowing its model.

        Raises:
          CheckpointDamaged: the step is damaged.
          CheckpointError: it is absent, or the machine could not read it.
        """
        self._read_content(step)

        def trees() -> dict[str, PyTree]:
            stored = self._reader.metadata(self._folder(step)).item_metadata
            return {item: jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stored[item])
                for item in _KINDS}

        for item, tree in self._report_damage(step, trees).items():  # holds one item at a time
            self._restore(step, {item: tree}, compare_dtypes=True)

    def _restore(self, step: int, trees: dict[str, PyTree], compare_dtypes: bool
                ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        if not self._is_there(step):
            raise CheckpointError(
                f"There is no checkpoint of step {step} in {self.directory}; {self._advice(step)}."
            )
        content = self._read_content(step, (*trees, "meta"))
        lacking = tree_record.lacking(content["params"], self._apart)
        if lacking and "params" in trees:
            trees = {**trees, "params": {name: tree for name, tree in trees["params"].items()
                                         if name not in lacking}}
        differences = [
            line
            for item, tree in trees.items()
            for line in tree_record.differences(_KINDS[item], content[item], tree, compare_dtypes)
        ]
        if differences:
            raise CheckpointMismatch(
                f"Checkpoint step {step} in {self.directory} was saved by another configuration:\n"
                + "\n".join("  " + line for line in differences)
            )
        targets = {item: self._args.StandardRestore(tree_record.restore_targets(
            content[item], tree)) for item, tree in trees.items()}
        restored = self._report_damage(step, lambda: self._reader.restore(
            self._folder(step), args=self._args.Composite(**targets)))

        def verify() -> None:
            for item in trees:
                tree_record.verify(_KINDS[item], content[item], restored[item])
            if bad := tree_record.non_finite(restored.get("params")):
                raise ValueError(f"parameter {first_of(bad, 1)} holds NaN or infinite values")

        self._report_damage(step, verify)  # after every process has read its part
        return {item: restored[item] for item in trees}, content["meta"]

    def _read_content(self, step: int, items: Sequence[str] = _ITEMS) -> dict[str, Any]:
        """Reads and verifies the `meta` item; raises CheckpointError as `restore` does."""
        self.wait()
        there = functools.partial(self._is_complete, step, items)
        here = self._report_damage(step, there)
        complete = hosts.exchange(here)[0]

        def look() -> None:
            if not complete:
                raise FileNotFoundError(f"one of {', '.join(items)} is missing")
            if not here and not locks.seen(there):
                raise _NotRead(f"process {hosts.index()} does not see all of "
                               f"{', '.join(items)}, which process 0 sees")
            if self._folder(step).is_symlink():
                raise _NotRead(f"{step} is a link; only folders that lie in the stage's folder "
                               "itself are read: put the step itself there")
            refuse_links(self._folder(step))

        def read() -> dict[str, Any]:
            stored = self._reader.restore(self._folder(step), args=self._args.Composite(
                meta=self._args.JsonRestore())).meta
            if stored["crc32"] != _crc32(stored["content"]):
                raise ValueError("the bytes of its meta item have changed")
            if (saved := stored["content"].get("step", step)) != step:
                raise ValueError(f"it is step {saved} under another name")
            return stored["content"]

        self._report_damage(step, look)  # in Orbax, one process would wait for another that fails
        return self._report_damage(step, read)

    def _report_damage(self, step: int, read: Callable[[], Any]) -> Any:
        """Returns read(). If it raises in any process, all raise: CheckpointError where a machine
        failed, as the step may be sound, else CheckpointDamaged."""
        orbax_noise.drop_orphans()
        result = damage = trouble = None
        try:
            result = read()
        except Exception as error:  # Orbax and TensorStore raise almost any type here
            if orbax_errors.is_interrupt(error):
                raise KeyboardInterrupt from None
            damage = orbax_errors.first_line(error)
            # On a bad disk a reader may take another step; a writer would lose this one.
            if not (self._read_only and orbax_errors.is_bad_disk(error)):
                trouble = (str(error) if isinstance(error, _NotRead)
                           else orbax_errors.of_machine(error))
        damages, troubles = (
            [cause for cause in causes if cause is not None]
            for causes in zip(*hosts.exchange([damage, trouble]), strict=True))
        if troubles:
            raise CheckpointError(
                f"Checkpoint step {step} in {self.directory} could not be read ({troubles[0]}); "
                "it may be sound, and nothing is changed there. Run the same command again once "
                f"that is mended; if it cannot be, move {self._folder(step)} away."
            )
        if not damages:
            return result
        raise CheckpointDamaged(
            f"Checkpoint step {step} in {self.directory} is damaged or unreadable ({damages[0]}); "
            f"{self._advice(step)}."
        )

    def _advice(self, step: int) -> str:
        others = [other for other in self.all_steps() if other != step]
        if not others:
            return "no other step is there: copy it back from elsewhere, or train in a new workdir"
        return f"other steps there: {', '.join(map(str, others))}"


def _has_content(folder: pathlib.Path) -> bool:
    """Whether a folder is there and holds more than hidden files."""
    try:
        return any(not name.startswith(".") for name in os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):  # it has been removed meanwhile
        return False


def _content(step, params, opt_state, meta, metrics) -> dict[str, Any]:
    """The content of the `meta` item; a deep copy, as it is written in the background."""
    content = {
        "step": step,
        "meta": dict(meta),
        "metrics": None if metrics is None else {k: float(v) for k, v in metrics.items()},
        "params": tree_record.record(params),
        "opt_state": tree_record.record(opt_state),
    }
    try:
        return json.loads(json.dumps(content))
    except (TypeError, ValueError) as error:
        raise ValueError(f"The meta of checkpoint step {step} is no JSON: {error}.") from None


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
