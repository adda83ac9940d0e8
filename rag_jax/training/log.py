"""The metrics of a run: metrics.jsonl, TensorBoard and the progress bar."""

import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import BinaryIO, TextIO

from rag_jax import files
from rag_jax.visible import is_terminal

_LINE_SECS = 10.0  # longest silence of the plain progress log while steps are being made
_FLUSH_SECS = 10.0  # the longest that events stay in the memory of the process


class MetricWriter(contextlib.AbstractContextManager):
    """Appends metrics to `<workdir>/metrics.jsonl` and, if wanted, to TensorBoard event files.

    Each write is one line, such as `{"step": 20, "train/nll": 3.1}`, handed to the system in one
    call: a killed run leaves at most its last line torn. JSON has no NaN or infinity; they are
    written as the strings "NaN", "Infinity" and "-Infinity".

    The training loop writes a line every `log_every` steps, with means over the steps since the
    line before, or since the checkpoint that the run went on from, as STAGE/NAME:

      nll, loss: - log p(y | x) in nats, and the loss, which smooths labels. Per question; per
        target token in the generator's warm-up.
      accuracy: retriever warm-up: share of questions whose positive scores highest.
      prior_entropy, posterior_entropy: of p(z | x) and p(z | x, y), in nats; Fusion-in-Decoder's
        posterior is the distribution that its retriever learns from, or p(z | x).
      retriever_loss: the retriever's part of loss, where train.retriever_objective gives it one.
      retriever_information: how much answers tell about passages (config.train.full_information),
        in nats.
      hybrid_weight: the weight of words, where it is learned (config.train.bm25_weight_rate).
      staleness: steps since the passage embeddings were made, where they are refreshed.
      grad_norm, grad_norm/TOWER: norm of the gradient before it is clipped, of all towers that
        train and of one.
      update_ratio/TOWER: norm of the update over the norm of the parameters, in the last of these
        steps; about 1e-3 is usual. 0 where these were 0.
      learning_rate/TOWER: of the tower; 0 where the collapse guard has frozen it.
      tokens: tokens of questions, passages and targets in a batch, of all devices.
      padding_share: share of the batch's token positions that are padding.
      without_passages: questions of a batch without retrieved passages; they train nothing.
      step_secs: seconds from one step's end to the next one's, without evaluation and saving; the
        first step of a process compiles.
      tokens_per_sec: tokens / step_secs.

    Besides: STAGE/effective_passages at the end of each window of the collapse guard, and dev/NAME
    at each evaluation.

    Args:
      workdir: local directory, created when absent.
      tensorboard: also write event files below `<workdir>/tensorboard`.
      active: False on every process but one, so that all of them can make the same calls.
    """

    def __init__(self, workdir: str | os.PathLike, *, tensorboard: bool = True, active=True):
        self._workdir = pathlib.Path(workdir)
        self._active = active
        self._tensorboard = tensorboard
        self._events = None  # both are opened by the first write
        self._lines = None
        self._purge_step: int | None = None

    @property
    def path(self) -> pathlib.Path:
        """The metrics.jsonl file."""
        return self._workdir / "metrics.jsonl"

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except OSError:
            if error is None:  # an earlier one says more
                raise

    def truncate_after(self, step: int) -> None:
        """Removes the metrics that an earlier run wrote after `step`; called when resuming there.

        Incomplete lines, such as the last one of a killed run, are removed as well. TensorBoard
        hides its own points after `step` once the next one is written.
        """
        if not self._active:
            return
        self.close()
        self._purge_step = step + 1
        if not self.path.exists():
            return
        kept = [
            line
            for line in self.path.read_bytes().split(b"\n")
            if (at := _step_of(line)) is not None and at <= step
        ]
        files.write_bytes(self.path, b"".join(line + b"\n" for line in kept))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes host scalars of one step; no metric may have the name "step"."""
        if not self._active:
            return
        if "step" in metrics:
            raise ValueError("'step' is the line's own field; give the metric another name.")
        values = {name: float(value) for name, value in metrics.items()}
        record = {"step": int(step), **{
            name: value if math.isfinite(value) else json.dumps(value)
            for name, value in values.items()}}
        if self._lines is None:
            self._lines = self._open_lines()
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        with files.naming(self.path):
            _write_whole(self._lines, line.encode() + b"\n")
        if self._tensorboard:
            if self._events is None:
                self._events = _Events(self._workdir / "tensorboard", self._purge_step)
            self._events.write(int(step), values)
            self._purge_step = int(step) + 1  # another file, after `close`, hides none of these

    def flush(self) -> None:
        """Hands what is written so far to the system, so that a kill does not lose it."""
        if self._events is not None:  # the lines are not buffered
            self._events.flush()

    def close(self) -> None:
        """Flushes and closes the files; a later write opens them again."""
        opened = [file for file in (self._lines, self._events) if file is not None]
        self._lines = self._events = None
        with contextlib.ExitStack() as every:
            for file in opened:
                every.callback(file.close)

    def _open_lines(self):
        self._workdir.mkdir(parents=True, exist_ok=True)
        file = open(self.path, "ab+", buffering=0)
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a torn line must not swallow the next one
                file.write(b"\n")
        return file


def _write_whole(file: BinaryIO, line: bytes) -> None:
    """Writes to an unbuffered file: in one system call, and the rest of a short write after it."""
    while line:
        line = line[file.write(line) :]


class _Events:
    """A file of TensorBoard's events.

    tensorboardX's SummaryWriter writes in a thread, which a full disk ends; its later calls then
    wait for ever.

    Args:
      folder: gets the file.
      purge_step: TensorBoard hides the points of earlier files from this step on; None = none.
    """

    def __init__(self, folder: pathlib.Path, purge_step: int | None):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self._folder, self._event, self._summary = folder, Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        with files.naming(folder):
            # Names count whole seconds: without a suffix a quick resume overwrites the first file.
            self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
            # TensorBoard takes a start for another one only after a first, which hides nothing.
            self._writer.write_event(Event(wall_time=time.time(), step=purge_step or 0,
                                           session_log=SessionLog(status=SessionLog.START)))
        self._flushed = -math.inf

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of one step by their names."""
        points = [self._summary.Value(tag=name, simple_value=value)
                  for name, value in values.items()]
        with files.naming(self._folder):
            self._writer.write_event(self._event(
                wall_time=time.time(), step=step, summary=self._summary(value=points)))
        if time.monotonic() - self._flushed > _FLUSH_SECS:
            self.flush()

    def flush(self) -> None:
        """Waits until the points are on the disk."""
        with files.naming(self._folder):
            self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        with files.naming(self._folder):
            self._writer.close()


class Progress(contextlib.AbstractContextManager):
    """The progress of a long loop: tqdm's bar with rate and ETA on a terminal, else plain lines.

    In a log file tqdm would redraw its bar with carriage returns. Where the stream is no terminal,
    a line comes every `every` steps, or after 10 seconds if that is sooner, and at the end:

        train 200/1000 (20.0%), 8.31 steps/s, ETA 1:36, nll 2.913

    Args:
      total: steps of the whole loop.
      initial: steps that are done already, as when a run resumes.
      description: name of the loop.
      every: steps between two plain lines.
      active: False on every process but one, which then shows nothing.
      stream: where to write; None is stderr.
      clock: seconds, monotonic; for tests.
    """

    def __init__(self, total: int, initial: int = 0, description: str = "", every: int = 100, *,
                 active: bool = True, stream: TextIO | None = None,
                 clock: Callable[[], float] = time.monotonic):
        self._total = total
        self._step = initial
        self._description = description
        self._every = every
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._line_step, self._line_time, self._first = initial, clock(), initial + 1
        self._bar, self._shown = None, {}
        self._active = active
        if active and is_terminal(self._stream):
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=initial,
                desc=description,
                unit="step",
                file=self._stream,
                dynamic_ncols=True,
            )

    def __exit__(self, *exc_info) -> None:
        self.close()

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Takes the number of steps done, and scalars to show.

        Scalars on a device are fetched only when they are shown.
        """
        advance, self._step = step - self._step, step
        if self._bar is not None:
            self._shown = metrics or self._shown
            if self._bar.update(advance):  # it was drawn; the next time it shows these metrics
                self._set_postfix()
            return
        now = self._clock()
        due = step - self._line_step >= self._every or now - self._line_time >= _LINE_SECS
        if self._active and step > self._line_step and (due or step >= self._total):
            print(self._line(now, metrics or {}), file=self._stream, flush=True)
            self._line_step, self._line_time = step, now

    def close(self) -> None:
        """Leaves the bar as it is and frees the terminal line."""
        if self._bar is not None:
            self._set_postfix()
            self._bar.close()

    def _set_postfix(self) -> None:
        values = {name: f"{float(value):.4g}" for name, value in self._shown.items()}
        self._bar.set_postfix(values, refresh=False)

    def _line(self, now: float, metrics: Mapping[str, float]) -> str:
        rate = (self._step - self._line_step) / max(now - self._line_time, 1e-9)
        remaining = max(self._total - self._step, 0)
        share = 100 * self._step / self._total if self._total else 100.0
        pace = [f"{rate:.3g} steps/s", f"ETA {_duration(remaining / rate)}"]
        parts = [
            f"{self._description} {self._step}/{self._total} ({share:.1f}%)".strip(),
            *(pace if self._step > self._first else ()),  # the first step also compiles
            *(f"{name} {float(value):.4g}" for name, value in metrics.items()),
        ]
        return ", ".join(parts)


def _step_of(line: bytes) -> int | None:
    """The step of one metrics.jsonl line, None where the line is no whole record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def _duration(secs: float) -> str:
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
