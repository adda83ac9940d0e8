"""watch.sh against a cloud that changes its answer from call to call."""

import re

import pytest

from tests.tpu_scripts.cloud import Cloud, called, if_synced, worker_line

COMMAND = ["python", "-m", "rag_jax.train", "--workdir=runs/a b", "it's"]
DESCRIBE = called("queued-resources", "describe", "t", "--format=value(state.state)")
NODE = called("tpu-vm", "describe", "t", "--format=value(state)")
STATES = called("tpu-vm", "ssh", "t", "--worker=all", f"--command={if_synced('state')}")
CREATE = called("queued-resources", "create", "t", "--node-id=t", "--accelerator-type=v4-8",
                "--runtime-version=tpu-ubuntu2204-base", "--spot",
                "--data-disk=source=projects/p/zones/z/disks/d,mode=read-write")
DELETE = called("queued-resources", "delete", "t", "--force", "--quiet")
SETUP = called("tpu-vm", "ssh", "t", "--worker=all",
               f"--command={worker_line('setup', 'LABEL=rag')}")
RUN = called("tpu-vm", "ssh", "t", "--worker=all", "--command=" + worker_line(
    "start", "python -m rag_jax.train --workdir=runs/a\\ b it\\'s"))
STOP = called("tpu-vm", "ssh", "t", "--worker=all", f"--command={worker_line('stop', '300')}")
LOOK = [DESCRIBE, NODE, STATES]
LAUNCH = ["copy", "unpack", SETUP, RUN]


def watch(cloud: Cloud, *options: str):
    return cloud.run("watch.sh", "--accelerator=v4-8", "--spot", "--disk=d", "--mount", "LABEL=rag",
                     "--poll=0", *options, "--", *COMMAND)


def steps(cloud: Cloud, commit: str) -> list:
    """The calls, with sync's two reduced to a word after a check that they carry the commit."""
    made = cloud.calls()
    for number, call in enumerate(made):
        if "scp" in call:
            assert call[4] == f"{cloud.root}/rag_jax-z-t-{commit}.tar.gz"
            made[number] = "copy"
        elif any("tar -xzf" in word for word in call):
            assert re.search(f"echo {commit} > src.new/COMMIT", call[6])
            made[number] = "unpack"
    return made


def state(cloud: Cloud, queued: str, node: str = "", *workers: str) -> None:
    """What one look finds: the states of the request, of the node and of the workers."""
    cloud.answer("queued-resources", "describe", out=queued + "\n")
    if node:
        cloud.answer("tpu-vm", "describe", out=node + "\n")
    if workers:
        lines = [f"t-w-{number}: {word}\n" for number, word in enumerate(workers)]
        cloud.answer("worker.sh state", out="".join(lines))


def missing(cloud: Cloud, group: str = "queued-resources") -> None:
    cloud.answer(group, "describe", code=1, err="ERROR: (gcloud) NOT_FOUND: Resource t\n")


def first_look(cloud: Cloud) -> None:
    """The look before the loop finds an active TPU."""
    state(cloud, "ACTIVE", "READY")


def test_from_nothing_until_done(cloud):
    commit = cloud.commit()
    missing(cloud)
    state(cloud, "WAITING_FOR_RESOURCES")
    state(cloud, "PROVISIONING")
    state(cloud, "ACTIVE", "CREATING")
    state(cloud, "ACTIVE", "READY", "idle", "idle")
    state(cloud, "ACTIVE", "READY", "running", "running")
    state(cloud, "ACTIVE", "READY", "done", "running")
    state(cloud, "ACTIVE", "READY", "done", "done")
    done = watch(cloud)
    assert done.returncode == 0, done.stderr
    assert steps(cloud, commit) == [
        DESCRIBE, CREATE, DESCRIBE, DESCRIBE, DESCRIBE, NODE, *LOOK, *LAUNCH, *LOOK, *LOOK, *LOOK]
    assert "t-w-0: done, t-w-1: running" in done.stdout
    assert "the TPU is still there (tpu_scripts/delete.sh)" in done.stdout


def test_a_preempted_tpu_is_created_again_and_runs_the_same(cloud):
    """The same commit, though the checkout has moved on; the same command, mount and disk."""
    commit = cloud.commit()
    first_look(cloud)
    state(cloud, "ACTIVE", "READY", "running")
    state(cloud, "SUSPENDING")
    state(cloud, "SUSPENDED")
    commit_more = "git -c user.name=t -c user.email=t commit --quiet --allow-empty -m more"
    cloud.answer("delete", do=f"{commit_more}; touch uncommitted")
    state(cloud, "ACTIVE", "READY", "idle")
    state(cloud, "ACTIVE", "READY", "done")
    assert watch(cloud).returncode == 0
    assert cloud.git("rev-parse", "HEAD").strip() != commit
    assert steps(cloud, commit) == [DESCRIBE, NODE, *LOOK, DESCRIBE, DESCRIBE, DELETE, CREATE,
                                    *LOOK, *LAUNCH, *LOOK]


@pytest.mark.parametrize("node", ["PREEMPTED", "TERMINATED", "MISSING"])
def test_a_lost_node_of_an_active_request_counts_as_preempted(cloud, node):
    commit = cloud.commit()
    first_look(cloud)
    state(cloud, "ACTIVE")
    missing(cloud, "tpu-vm") if node == "MISSING" else cloud.answer("tpu-vm", "describe", out=node)
    state(cloud, "FAILED")
    assert watch(cloud).returncode == 1
    assert steps(cloud, commit) == [DESCRIBE, NODE, DESCRIBE, NODE, DELETE, CREATE, DESCRIBE]


@pytest.mark.parametrize("word", ["interrupted", "failed 1", "idle"])
def test_a_command_that_ended_is_started_again_on_all_workers(cloud, word):
    """Peers that still run may wait for ever for the one that ended: they are stopped first."""
    commit = cloud.commit()
    first_look(cloud)
    state(cloud, "ACTIVE", "READY", "running", word)
    state(cloud, "ACTIVE", "READY", "done", "done")
    assert watch(cloud).returncode == 0
    assert steps(cloud, commit) == [DESCRIBE, NODE, *LOOK, STOP, *LAUNCH, *LOOK]


def test_a_command_that_keeps_failing_is_given_up(cloud):
    commit = cloud.commit()
    first_look(cloud)
    for _ in range(3):
        state(cloud, "ACTIVE", "READY", "failed 1")
    done = watch(cloud, "--restarts=1")
    assert done.returncode == 1 and "started 2 times on this TPU" in done.stderr
    assert steps(cloud, commit) == [DESCRIBE, NODE, *LOOK, *LAUNCH, *LOOK, *LAUNCH, *LOOK]


def test_restarts_count_for_one_tpu(cloud):
    """Preemptions alone never use them up."""
    first_look(cloud)
    for _ in range(2):
        state(cloud, "ACTIVE", "READY", "idle")
        state(cloud, "SUSPENDED")
    state(cloud, "ACTIVE", "READY", "done")
    assert watch(cloud, "--restarts=0").returncode == 0
    first_look(cloud)
    state(cloud, "ACTIVE", "READY", "failed 1")
    state(cloud, "ACTIVE", "READY", "done")
    assert watch(cloud, "--restarts=08").returncode == 0, "no octal number"


def test_half_a_start_is_repeated(cloud):
    """The TPU may go away, or ssh drop, at any step of a start."""
    commit = cloud.commit()
    first_look(cloud)
    state(cloud, "ACTIVE", "READY", "idle")
    cloud.answer("scp", code=1, err="lost connection\n")
    state(cloud, "ACTIVE", "READY", "idle")
    cloud.answer("worker.sh setup", code=1)
    state(cloud, "ACTIVE", "READY", "idle")
    state(cloud, "ACTIVE", "READY", "done")
    done = watch(cloud)
    assert done.returncode == 0 and "lost connection" in done.stderr
    assert steps(cloud, commit) == [DESCRIBE, NODE, *LOOK, "copy", *LOOK, "copy", "unpack", SETUP,
                                    *LOOK, *LAUNCH, *LOOK]


def test_what_fails_on_the_way_is_tried_again(cloud):
    """Answers missing for a while, no ssh, a delete or create that fails: days may lie between."""
    commit = cloud.commit()
    first_look(cloud)
    cloud.answer("queued-resources", "describe", code=1, err="network is down\n")
    state(cloud, "ACTIVE", "READY")
    cloud.answer("worker.sh state", code=255, err="ssh timed out\n")
    state(cloud, "SUSPENDED")
    cloud.answer("delete", code=1)
    state(cloud, "SUSPENDED")
    cloud.answer("create", code=1)
    missing(cloud)
    cloud.answer("create", code=1)
    missing(cloud)
    state(cloud, "ACTIVE", "READY", "done")
    done = watch(cloud)
    assert done.returncode == 0
    assert "network is down" in done.stderr and "ssh timed out" in done.stderr
    assert steps(cloud, commit) == [
        DESCRIBE, NODE, DESCRIBE, *LOOK, DESCRIBE, DELETE, DESCRIBE, DELETE, CREATE, DESCRIBE,
        CREATE, DESCRIBE, CREATE, *LOOK]


def test_what_is_wrong_from_the_beginning_ends_at_once(cloud):
    cloud.answer("describe", code=1, err="ERROR: PERMISSION_DENIED\n")
    done = watch(cloud)
    assert done.returncode == 1 and "PERMISSION_DENIED" in done.stderr
    assert cloud.calls() == [DESCRIBE]
    missing(cloud)
    cloud.answer("create", code=1, err="ERROR: no such accelerator\n")
    done = watch(cloud)
    assert done.returncode == 1 and "no such accelerator" in done.stderr
    assert cloud.calls() == [DESCRIBE, CREATE]


def test_a_request_that_failed_is_left_to_its_user(cloud):
    state(cloud, "FAILED")
    state(cloud, "FAILED")
    done = watch(cloud)
    assert done.returncode == 1 and "Cloud gave the request up" in done.stderr
    assert cloud.calls() == [DESCRIBE, DESCRIBE]


def test_uncommitted_changes_are_refused_before_anything_is_created(cloud):
    (cloud.checkout / "new").touch()
    done = watch(cloud)
    assert done.returncode == 1 and "uncommitted changes" in done.stderr
    assert cloud.calls() == []


def test_without_a_mount_it_warns(cloud):
    state(cloud, "FAILED")
    state(cloud, "FAILED")
    done = cloud.run("watch.sh", "--accelerator=v4-8", "--poll=0", "true")
    assert "without --mount, a preemption takes the workdir with it" in done.stdout
