"""What happens on the workers: worker.sh is really run, in folders that stand for their homes."""

import os
import signal
import subprocess

import pytest

from tests.tpu_scripts.cloud import Cloud

NOTING = 'printf "%s|" "$(basename "$0")" "$@" >> "$HOME/noted"; echo >> "$HOME/noted"'


class Worker:
    """A worker with the code, and its commands."""

    def __init__(self, cloud: Cloud):
        self.cloud, self.home = cloud, cloud.worker()
        self.place = self.home / "rag_jax"
        done = cloud.run("sync.sh")
        assert done.returncode == 0, done.stderr
        (self.place / "venv/bin").mkdir(parents=True)

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        line = ["bash", "rag_jax/src/tpu_scripts/worker.sh", *arguments]
        environment = self.cloud.environment(HOME=str(self.home))
        return subprocess.run(line, cwd=self.home, env=environment, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=300)

    def start(self, script: str) -> None:
        done = self.run("start", "bash", "-c", script)
        assert done.returncode == 0, done.stderr

    def wait(self) -> None:
        """Until the command has ended, which is when nothing holds the lock any more."""
        subprocess.run(["flock", self.place / "lock", "true"], check=True, timeout=300)

    @property
    def state(self) -> str:
        return self.run("state").stdout.strip()

    @property
    def pid(self) -> int:
        return int((self.place / "pid").read_text())

    @property
    def log(self) -> str:
        return (self.place / "runs/logs/t-w-0.log").read_text()


@pytest.fixture
def worker(cloud):
    return Worker(cloud)


@pytest.fixture
def gate(worker):
    """A pipe on which a command waits: open(gate, "w") returns when it does, or raises."""
    def late(*_):
        raise TimeoutError("no command has opened the pipe")

    path = worker.home / "gate"
    os.mkfifo(path)
    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(100)
    yield path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)
    if worker.state.endswith("running"):
        os.killpg(worker.pid, signal.SIGKILL)


def test_a_command_runs_detached_with_a_log(worker, gate):
    """Own session, no terminal, nothing inherited that an ssh connection would wait for."""
    assert worker.state == "t-w-0: idle"
    (worker.place / "venv/bin/tool").write_text('#!/bin/sh\npwd; printf "<%s>" "$@"; cat "$GATE"')
    (worker.place / "venv/bin/tool").chmod(0o755)
    done = worker.run("start", "env", f"GATE={gate}", "tool", "a b", "it's", "")
    assert done.returncode == 0 and done.stdout == done.stderr == ""
    with open(gate, "w") as file:  # the command has begun, and waits
        assert worker.state == "t-w-0: running"
        assert os.getsid(worker.pid) == worker.pid
        assert worker.run("start", "true").returncode == 1
        file.write("end")
    worker.wait()
    assert worker.state == "t-w-0: done"
    commit = worker.cloud.git("rev-parse", "HEAD").strip()
    header, *output = worker.log.splitlines()
    assert header.endswith(f" commit {commit}: env GATE={gate} tool a\\ b it\\'s ''")
    assert output == [str(worker.place / "src"), "<a b><it's><>end"]
    assert worker.run("status", "1").stdout == "t-w-0: done\n<a b><it's><>end"


def test_how_a_command_ended(worker):
    for script, state in (("exit 3", "failed 3"), ("true", "done"), ("kill -9 $$", "failed 137"),
                          ("exit 75", "interrupted"),  # of rag_jax.train, stopped by a signal
                          ("kill $$", "interrupted")):  # and where SIGTERM ended it at once
        worker.start(script)
        worker.wait()
        assert worker.state == f"t-w-0: {state}"
    assert worker.log.count("== ") == 5  # one log over all starts
    assert worker.run("start", "no-such-program").returncode == 0
    worker.wait()
    assert worker.state == "t-w-0: failed 127" and "no-such-program" in worker.log


def test_stop_lets_a_command_save(worker, gate):
    """Whatever status it ends a SIGTERM with, it is no command that is done."""
    os.mkfifo(worker.home / "never")
    worker.start(f"trap 'echo saved; exit 0' TERM; echo begun > {gate}; "
                 f"read <> {worker.home}/never")
    with open(gate) as file:
        assert file.readline() == "begun\n"
    assert worker.run("stop", "15").returncode == 0
    assert worker.state == "t-w-0: interrupted" and "saved" in worker.log
    assert worker.run("stop", "15").returncode == 0  # nothing runs any more: nothing to do


def test_stop_kills_what_does_not_end(worker, gate):
    worker.start(f"trap '' TERM; cat {gate}; cat {gate}")
    with open(gate, "w"):
        assert worker.run("stop", "0").returncode == 0
        assert worker.state == "t-w-0: interrupted"


def test_a_machine_that_went_down_was_interrupted(worker, gate):
    """Whatever became of the command before."""
    worker.start("true")
    worker.wait()
    worker.start(f"cat {gate}")
    with open(gate, "w"):
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    assert worker.state == "t-w-0: interrupted"


def test_sync_keeps_what_was_written_and_waits_for_no_command(worker, gate):
    """New code never gets under a running command; runs/ outlives every sync."""
    worker.start(f"echo result > runs/result; cat {gate}")
    with open(gate, "w"):
        refused = worker.cloud.run("sync.sh")
        assert refused.returncode == 1 and "a command is running here" in refused.stderr
    worker.wait()
    (worker.cloud.checkout / "new.txt").write_text("committed")
    commit = worker.cloud.commit()
    assert worker.cloud.run("sync.sh").returncode == 0
    assert (worker.place / "src/new.txt").exists()
    assert (worker.place / "src/COMMIT").read_text() == commit + "\n"
    assert (worker.place / "src/runs/result").read_text() == "result\n"


def test_setup(worker):
    """The mount first, then Python 3.11 by uv, then the package; a second time only what may
    have changed."""
    (worker.place / "venv/bin").rmdir()
    cloud = worker.cloud
    cloud.program("sudo", NOTING)
    cloud.program("mountpoint", "exit ${MOUNTED-1}")
    tool = f"#!/usr/bin/env bash\n{NOTING}"
    cloud.program("python3", f"""{NOTING}
if [[ "$*" == *' venv '* ]]; then
  mkdir -p venv/bin
  echo '{tool}' | tee venv/bin/pip > venv/bin/python
  chmod +x venv/bin/*
fi""")
    done = worker.run("setup", "10.0.0.2:/rag")
    assert done.returncode == 0, done.stderr
    noted = (worker.home / "noted").read_text().splitlines()
    if not os.path.exists("/sbin/mount.nfs"):
        assert noted.pop(0) == ("sudo|apt-get|-o|DPkg::Lock::Timeout=300|install|--yes|--quiet|"
                                "nfs-common|")
    install = "pip|install|--quiet|-e|./src[tpu]|"
    assert noted[:4] == [
        "sudo|mount|10.0.0.2:/rag|runs|", "python3|-m|pip|install|--user|--quiet|uv|",
        "python3|-m|uv|venv|--quiet|--seed|--python|3.11|venv|", install]
    assert noted[4].startswith("python|-c|import jax, rag_jax")
    (worker.home / "noted").unlink()
    cloud.program("mountpoint", "exit 0")
    assert worker.run("setup", "10.0.0.2:/rag").returncode == 0
    assert (worker.home / "noted").read_text().splitlines()[0] == install
    done = worker.run("setup", "10.0.0.3:/rag")
    assert done.returncode == 1 and "mounted from 10.0.0.2:/rag, not 10.0.0.3:/rag" in done.stderr

    worker.start("true")
    worker.wait()
    cloud.program("mountpoint", "exit 1")
    done = worker.run("start", "true")
    assert done.returncode == 1, "a run would begin anew on the disk below"
    assert "mount it again (tpu_scripts/setup.sh --mount=10.0.0.2:/rag)" in done.stderr


@pytest.mark.parametrize("failing, said", [
    ("pip", "uv, which brings Python 3.11, could not be installed"),
    ("uv", "no Python 3.11: none is installed, and uv could not download one")])
def test_setup_without_a_python(worker, failing, said):
    worker.cloud.program("python3", f'[ "$2" != {failing} ]')
    done = worker.run("setup", "")
    assert done.returncode == 1 and said in done.stderr


@pytest.mark.parametrize("script, arguments", [
    ("run.sh", ["true"]), ("setup.sh", []), ("stop.sh", []), ("fetch.sh", ["runs/x"])])
def test_a_tpu_without_the_code_says_so(cloud, script, arguments):
    cloud.worker()
    done = cloud.run(script, *arguments)
    assert done.returncode and "t-w-0: there is no code yet (tpu_scripts/sync.sh)" in done.stderr


def test_two_workers_from_sync_to_fetch(cloud):
    homes = [cloud.worker(), cloud.worker()]
    assert cloud.run("sync.sh").returncode == 0
    script = 'echo "on $HOSTNAME$FAKE_HOST"; mkdir -p "runs/a b"; echo $FAKE_HOST > "runs/a b/x"'
    assert cloud.run("run.sh", "bash", "-c", script).returncode == 0
    for home in homes:
        subprocess.run(["flock", home / "rag_jax/lock", "true"], check=True, timeout=300)
    cloud.answer("describe", out="ACTIVE\n")
    shown = cloud.run("status.sh", "--lines=0").stdout
    assert shown == "ACTIVE\nt-w-0: done\nt-w-1: done\n"
    assert cloud.run("fetch.sh", "runs/a b").returncode == 0
    fetched = cloud.checkout / "runs/t"
    assert (fetched / "a b/x").read_text() == "t-w-0\n"
    for number in range(2):
        assert f"t-w-{number}\n" in (fetched / f"logs/{number}.log").read_text()


def test_results_of_one_name_are_fetched_apart(cloud):
    """Of the evaluations of two runs, as README fetches them, the second took the first's place."""
    runs, home = ("rag_token", "rag_sequence"), cloud.worker()
    assert cloud.run("sync.sh").returncode == 0
    for run in runs:
        folder = home / f"rag_jax/runs/nq/{run}/evaluation"
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text(run)
    done = cloud.run("fetch.sh", *[f"runs/nq/{run}/evaluation" for run in runs])
    assert done.returncode == 0, done.stderr
    for run in runs:
        fetched = cloud.checkout / f"runs/t/nq/{run}/evaluation/metrics.json"
        assert fetched.read_text() == run


def test_other_words_are_refused(worker):
    done = worker.run("rm", "-rf", "src")
    assert done.returncode == 1 and "rm: not one of its commands" in done.stderr
