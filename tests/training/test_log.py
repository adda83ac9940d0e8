"""metrics.jsonl stays whole through kills and resumes; progress reads well."""

import errno
import io
import json
import math
import os
import pathlib

import numpy as np
import pytest

from rag_jax.training.log import MetricWriter, Progress


def records(workdir):
    """All lines of metrics.jsonl; NaN or Infinity as bare words is no JSON and fails here."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    text = (workdir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def write_steps(workdir, steps, **metrics):
    with MetricWriter(workdir, tensorboard=False) as writer:
        for step in steps:
            writer.write(step, {"nll": step / 10, **metrics})


def test_each_write_is_one_line_on_disk_at_once(tmp_path):
    writer = MetricWriter(tmp_path / "new" / "run", tensorboard=False)
    writer.write(1, {"nll": np.float32(0.5), "réponse": 3})
    writer.write(2, {"nll": 0.25})
    assert records(tmp_path / "new" / "run") == [
        {"step": 1, "nll": 0.5, "réponse": 3.0},
        {"step": 2, "nll": 0.25},
    ]


def test_nan_and_infinity_stay_valid_json(tmp_path):
    write_steps(tmp_path, [7], a=math.nan, b=math.inf, c=-math.inf)
    assert records(tmp_path) == [
        {"step": 7, "nll": 0.7, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    ]


def test_resume_drops_later_steps_and_keeps_earlier_lines_byte_for_byte(tmp_path):
    write_steps(tmp_path, [10, 20, 30, 40])
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    writer = MetricWriter(tmp_path, tensorboard=False)
    writer.truncate_after(20)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before[:2])
    writer.write(30, {"nll": 9.0})
    assert [r["step"] for r in records(tmp_path)] == [10, 20, 30]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 3, "nl', b'{"step": 3', b"{", b"3", b'{"step": 3}'])
def test_torn_last_line_is_dropped_on_resume(tmp_path, torn):
    write_steps(tmp_path, [1, 2])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(torn)
    writer = MetricWriter(tmp_path, tensorboard=False)
    writer.truncate_after(2)
    writer.write(3, {"nll": 0.3})
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]


def test_torn_line_does_not_swallow_the_next_one(tmp_path):
    """A writer that appends without truncating must not glue its record to the torn one."""
    write_steps(tmp_path, [1])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "n')
    write_steps(tmp_path, [3])
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3
    MetricWriter(tmp_path, tensorboard=False).truncate_after(10)
    assert [r["step"] for r in records(tmp_path)] == [1, 3]


def test_truncate_without_a_file_does_nothing(tmp_path):
    MetricWriter(tmp_path / "none").truncate_after(5)
    assert os.listdir(tmp_path) == []


def test_failed_truncation_leaves_the_old_file(tmp_path, monkeypatch):
    write_steps(tmp_path, [1, 2, 3])

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        MetricWriter(tmp_path, tensorboard=False).truncate_after(1)
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]


def test_tensorboard_gets_the_scalars_and_purges_on_resume(tmp_path):
    for resumed_from in (None, 10):
        with MetricWriter(tmp_path) as writer:
            if resumed_from is not None:
                writer.truncate_after(resumed_from)
            for step in (10, 20):
                writer.write(step, {"train/nll": 0.125})
    files = list((tmp_path / "tensorboard").iterdir())
    data = b"".join(file.read_bytes() for file in files)
    assert data.count(b"train/nll") >= 4
    # To TensorBoard, the first start that it reads is no resumption.
    assert sorted(_starts(file) for file in files) == [[0], [11]]


def test_events_written_after_a_close_hide_none_before_it(tmp_path):
    with MetricWriter(tmp_path) as writer:
        for step in (10, 20):
            writer.write(step, {"train/nll": 0.125})
        writer.close()
        writer.write(20, {"dev/em": 1.0})
    assert sorted(map(_starts, (tmp_path / "tensorboard").iterdir())) == [[0], [21]]


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(),
                    reason="needs /dev/full, Linux's file on a full disk")
def test_a_full_disk_ends_the_writing_of_events_with_an_error(tmp_path):
    """A thread of tensorboardX ended, and training waited for it for ever."""
    def fill(writer):
        writer.write(1, {"train/nll": 0.125})
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), writer._events._writer._py_recordio_writer._writer.fileno())

    with MetricWriter(tmp_path) as writer:
        fill(writer)
        with pytest.raises(OSError, match="No space left on device: .*tensorboard"):
            for step in range(2, 10_000):  # until the buffer is full
                writer.write(step, {"train/nll": 0.125})
        with pytest.raises(OSError, match="No space left on device: .*tensorboard"):
            writer.close()
        writer.write(step, {"train/nll": 0.25})
    assert records(tmp_path)[-1]["train/nll"] == 0.25
    with pytest.raises(ZeroDivisionError), MetricWriter(tmp_path) as writer:
        fill(writer)
        raise ZeroDivisionError  # it is not hidden by the end of the file of events


def test_a_short_write_is_finished_and_an_error_named(tmp_path):
    """The line was torn without a word."""
    class Short:
        def __init__(self):
            self.text = b""

        def write(self, data):
            if len(self.text) > 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.text += data[:10]
            return min(len(data), 10)

        def close(self):
            pass

    with MetricWriter(tmp_path, tensorboard=False) as writer:
        writer._lines = file = Short()
        writer.write(1, {"nll": 1.0})
        assert file.text == b'{"step": 1, "nll": 1.0}\n'
        with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
            writer.write(2, {"nll": 1.0})


def _starts(path):
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    data, at, events = path.read_bytes(), 0, []
    while at < len(data):  # TFRecord: length 8, crc 4, payload, crc 4
        length = int.from_bytes(data[at : at + 8], "little")
        events.append(Event.FromString(data[at + 12 : at + 12 + length]))
        at += 16 + length
    return [e.step for e in events if e.session_log.status == SessionLog.START and e.wall_time]


def test_inactive_writer_touches_nothing(tmp_path):
    writer = MetricWriter(tmp_path / "run", active=False)
    writer.truncate_after(3)
    writer.write(4, {"nll": 1.0})
    writer.close()
    assert os.listdir(tmp_path) == []


def test_a_reserved_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="step"):
        MetricWriter(tmp_path).write(1, {"step": 2.0})


def progress_lines(total, seconds, **kwargs):
    """The plain lines of a loop whose k-th step is done `seconds[k]` after its start."""
    times = iter([0.0, *seconds])
    stream = io.StringIO()
    progress = Progress(total, stream=stream, clock=lambda: next(times), **kwargs)
    first = kwargs.get("initial", 0) + 1
    for step in range(first, first + len(seconds)):
        progress.update(step, {"nll": 2.5})
    progress.close()
    return stream.getvalue().splitlines()


def test_plain_progress_has_step_rate_eta_and_metrics():
    lines = progress_lines(100, [0.5, 1.0, 1.5, 2.0], every=4, description="train")
    assert lines == ["train 4/100 (4.0%), 2 steps/s, ETA 0:48, nll 2.5"]


def test_plain_progress_breaks_the_silence_after_ten_seconds_and_at_the_end():
    lines = progress_lines(5, [4, 8, 12, 13, 14], every=1000)
    assert [line.split()[0] for line in lines] == ["3/5", "5/5"]
    assert "ETA 0:08" in lines[0]  # two steps at 0.25 a second


def test_the_first_step_which_also_compiles_says_nothing_of_the_rate():
    """It said that a minute's work would take five hours."""
    lines = progress_lines(600, [33, 34, 44], every=1000)
    assert lines == ["1/600 (0.2%), nll 2.5", "3/600 (0.5%), 0.182 steps/s, ETA 54:44, nll 2.5"]


def test_resumed_progress_counts_only_its_own_steps_in_the_rate():
    (line,) = progress_lines(7300, [1.0, 2.0], initial=98, every=2)
    assert line.startswith("100/7300 (1.4%), 1 steps/s, ETA 2:00:00")


def test_terminal_gets_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Progress(10, initial=4, description="embed", stream=stream) as progress:
        progress.update(10, {"nll": 1.25})
    assert "embed" in stream.getvalue() and "10/10" in stream.getvalue()
    assert "nll=1.25" in stream.getvalue()
