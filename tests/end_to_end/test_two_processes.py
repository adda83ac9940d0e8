"""Two processes with four virtual devices each against one with eight, and what ends them."""

import json
import pathlib
import shutil
import signal
import subprocess

import numpy as np
import pytest

from rag_jax.retrieval.versions import current
from tests.end_to_end import hosts
from tests.end_to_end.test_resume import arrays

pytestmark = pytest.mark.multihost
# What a process says of another that died: we, or jax, which may be faster.
GONE = ("another process of the job is gone", "another task died")
STAGES = {"retriever": 6, "generator": 6, "rag_token": 20}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("two")
    leader, other = hosts.finish("train", workdir, *hosts.FLAGS)
    assert "rag_token 20/20" in leader and "EM, rag_token" in leader
    assert "rag_token" not in other, "one process prints and writes"
    return workdir


def losses(workdir: pathlib.Path, stage: str, metric: str = "nll") -> list[float]:
    lines = (workdir / stage / "metrics.jsonl").read_text().splitlines()
    name = f"{stage}/{metric}"
    return [record[name] for line in lines if name in (record := json.loads(line))]


def test_two_processes_train_what_one_trains(two, tmp_path):
    """Losses of every step of every stage, the last checkpoint, the index and the report."""
    hosts.finish("train", tmp_path, *hosts.FLAGS, processes=1)
    for stage, steps in STAGES.items():
        found, expected = losses(two, stage), losses(tmp_path, stage)
        assert len(found) == steps
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    retrieved = [losses(w, "rag_token", "effective_passages") for w in (two, tmp_path)]
    assert retrieved[0] == retrieved[1] and len(retrieved[0]) == 4, "by both processes together"
    for step in (14, 20):
        assert_close(arrays(two, step), arrays(tmp_path, step))
    embedded = [np.fromfile(current(workdir / "indexes" / "2018") / "embeddings.f32", "<f4")
                for workdir in (two, tmp_path)]
    np.testing.assert_allclose(*embedded, rtol=1e-5, atol=1e-5)
    reports = [json.loads((w / "report.json").read_text()) for w in (two, tmp_path)]
    assert reports[0]["em"] == pytest.approx(reports[1]["em"])


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Every array of a checkpoint, parameters and optimiser state."""
    assert found.keys() == expected.keys() and len(found) > 20
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def test_two_processes_share_an_index_on_their_devices(tmp_path):
    """They train and evaluate what one process with all the devices does, all three towers."""
    device = ["--config.retrieval.where=device", "--config.retrieval.device_dtype=float32",
              "--config.train.document_encoder=refresh", "--config.train.refresh_every=3",
              "--config.train.refresh_passages=40"]
    for processes in (1, 2):
        hosts.finish("train", tmp_path / str(processes), *hosts.FLAGS, *device,
                     processes=processes)
    found, expected = (losses(tmp_path / str(n), "rag_token") for n in (2, 1))
    assert len(found) == STAGES["rag_token"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    reports = [json.loads((tmp_path / str(n) / "report.json").read_text()) for n in (2, 1)]
    assert reports[0]["em"] == pytest.approx(reports[1]["em"])
    assert reports[0]["index"]["2018"]["recall"] == reports[1]["index"]["2018"]["recall"] == 1.0


def test_processes_with_other_numbers_of_devices_are_all_told_so(tmp_path):
    """A good checkpoint was called damaged. Where all fail, process 0, which carries all messages,
    ended before the others could say why: they were aborted."""
    job = hosts.start("train", tmp_path, *hosts.FLAGS, devices=(2, 1))
    printed = [process.communicate(timeout=300)[0] for process in job]
    assert [process.returncode for process in job] == [1, 1]
    assert all("error: the processes have different numbers of devices, 2, 1" in text
               for text in printed)


def begin_again(two: pathlib.Path, workdir: pathlib.Path) -> None:
    """A workdir in which all is done but the fine-tuning."""
    shutil.copytree(two, workdir, dirs_exist_ok=True)
    shutil.rmtree(workdir / "rag_token")


def until(job: list[subprocess.Popen], marker: str) -> None:
    """Reads what process 0 prints until a line has `marker`."""
    seen = []
    for line in job[0].stdout:
        seen.append(line)
        if marker in line:
            return
    pytest.fail(f"training never printed {marker!r}:\n{''.join(seen)[-3000:]}")


def steps(workdir: pathlib.Path) -> list[int]:
    return sorted(int(p.name) for p in (workdir / "rag_token").iterdir() if p.name.isdigit())


def test_a_signal_to_one_stops_all_and_the_same_command_goes_on(two, tmp_path):
    begin_again(two, tmp_path)
    job = hosts.start("train", tmp_path, *hosts.FLAGS)
    until(job, "rag_token 3/20")
    job[1].send_signal(signal.SIGTERM)
    printed = [process.communicate()[0] for process in job]
    assert [process.returncode for process in job] == [75, 75], printed[0][-3000:]
    assert all("checkpoint saved" in text for text in printed)
    (stopped,) = steps(tmp_path)
    assert 3 <= stopped < 20 and all(f"stopped at step {stopped}," in text for text in printed)
    hosts.finish("train", tmp_path, *hosts.FLAGS)
    assert_bitwise(tmp_path, two)


def assert_bitwise(workdir: pathlib.Path, other: pathlib.Path) -> None:
    found, expected = arrays(workdir, 20), arrays(other, 20)
    assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())
    assert losses(workdir, "rag_token") == losses(other, "rag_token")


@pytest.mark.parametrize("killed,processes", [(1, 2), (0, 1)])
def test_a_killed_process_ends_all_and_the_run_goes_on(two, tmp_path, killed, processes):
    """Bitwise on as many processes; process 0 is also the one that all others talk to. On one
    process, with the optimiser's state of two, all is the same but for rounding."""
    begin_again(two, tmp_path)
    job = hosts.start("train", tmp_path, *hosts.FLAGS, heartbeat=20)
    until(job, "rag_token 16/20")
    job[killed].kill()
    left = job[1 - killed]
    printed = left.communicate(timeout=900)[0]
    assert left.returncode not in (0, None)
    assert any(text in printed for text in GONE), printed[-3000:]
    assert steps(tmp_path)[-1] == 14, "saved every 7 steps"

    hosts.finish("train", tmp_path, *hosts.FLAGS, processes=processes)
    if processes == 2:
        assert_bitwise(tmp_path, two)
    else:
        assert_close(arrays(tmp_path, 20), arrays(two, 20))
        found, expected = losses(tmp_path, "rag_token"), losses(two, "rag_token")
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert found[:14] == expected[:14], "taken up, not begun again"


def test_a_checkpoint_of_two_processes_is_read_by_one(two, tmp_path):
    """Another number of processes and devices evaluates it, and answers the same. The two are
    started as by srun."""
    flags = ["--split=dev", "--config.mesh.fsdp=1", "--config.mesh.data=-1"]
    found = []
    for processes in (1, 2):
        printed = hosts.finish("evaluate", two, *flags, processes=processes, slurm=True)
        assert len(printed) == processes
        assert all(f"process {i} of 2" in text for i, text in enumerate(printed)) == (
            processes == 2)
        folder = two / "rag_token" / "evaluation" / "dev"
        found.append([json.loads(line) for line in (folder / "predictions.jsonl").open()])
    for one, other in zip(*found, strict=True):
        assert one["answer"] == other["answer"]
        assert [p["id"] for p in one["passages"]] == [p["id"] for p in other["passages"]]
