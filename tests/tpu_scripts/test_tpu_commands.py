"""Which gcloud commands each script runs, and what it refuses."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tpu_scripts.cloud import SCRIPTS, called, if_synced, worker_line

# Odd arguments, which must reach the program on a worker as they are.
ODD = ["a b", "it's", '"$HOME" `id`', "*", "", "line\nbreak", "ü;&|", "--flag=x y", "\\n"]
# A line of arguments for every script that speaks to a TPU.
LINES = {
    "create.sh": ["--accelerator=v5litepod-8", "--spot", "--disk=my disk", "--", "--network=a b"],
    "sync.sh": ["--commit=HEAD"],
    "setup.sh": ["--mount=LABEL=rag"],
    "run.sh": ["python", "-m", "rag_jax.train", *ODD],
    "status.sh": [],
    "stop.sh": [],
    "fetch.sh": ["--to=out put", "runs/mine/report.json", "runs/a b"],
    "delete.sh": [],
    "watch.sh": ["--accelerator=v4-8", "--commit=HEAD", "--poll=0", "--", "python", *ODD],
}


def ssh(line, worker="all", *flags):
    return called("tpu-vm", "ssh", "t", f"--worker={worker}", f"--command={line}", *flags)


def test_create(cloud):
    assert cloud.run("create.sh", *LINES["create.sh"]).returncode == 0
    assert cloud.calls() == [called(
        "queued-resources", "create", "t", "--node-id=t", "--accelerator-type=v5litepod-8",
        "--runtime-version=v2-alpha-tpuv5-lite", "--spot",
        "--data-disk=source=projects/p/zones/z/disks/my disk,mode=read-write", "--network=a b")]


@pytest.mark.parametrize("accelerator, runtime", [
    ("v3-8", "tpu-ubuntu2204-base"), ("v4-8", "tpu-ubuntu2204-base"),
    ("v5litepod-64", "v2-alpha-tpuv5-lite"), ("v5p-8", "v2-alpha-tpuv5"),
    ("v6e-4", "v2-alpha-tpuv6e")])
def test_runtime_follows_the_accelerator(cloud, accelerator, runtime):
    cloud.run("create.sh", "--accelerator", accelerator)
    cloud.run("create.sh", "--accelerator", accelerator, "--runtime", "mine")
    for call, version in zip(cloud.calls(), (runtime, "mine"), strict=True):
        assert call == called("queued-resources", "create", "t", "--node-id=t",
                              f"--accelerator-type={accelerator}", f"--runtime-version={version}")


def test_sync_takes_the_commit_and_no_more(cloud):
    """What came after the commit does not travel, committed or not."""
    wanted = cloud.commit()
    home = cloud.worker()
    (cloud.checkout / "new.txt").write_text("uncommitted")
    refused = cloud.run("sync.sh")
    assert refused.returncode == 1 and "uncommitted changes" in refused.stderr
    assert cloud.calls() == []
    (cloud.checkout / "later.txt").touch()
    cloud.git("add", "later.txt")
    cloud.git("commit", "--quiet", "--message=later")
    assert cloud.run("sync.sh", "--commit=HEAD~1").returncode == 0
    copied, unpacked = cloud.calls()
    archive = f"{cloud.root}/rag_jax-z-t-{wanted}.tar.gz"
    assert copied == called("tpu-vm", "scp", archive, "t:rag_jax.tar.gz", "--worker=all")
    assert unpacked[:6] == ["compute", "tpus", "tpu-vm", "ssh", "t", "--worker=all"]
    assert (home / "rag_jax/src/COMMIT").read_text() == wanted + "\n"
    assert (home / "rag_jax/src/tpu_scripts/run.sh").exists()
    for name in ("new.txt", "later.txt"):
        assert not (home / "rag_jax/src" / name).exists()
    assert not Path(archive).exists()


@pytest.mark.parametrize("other", ["--tpu=u", "--zone=y"])
def test_several_tpus_are_synced_at_the_same_time(cloud, other):
    """The second took away the archive of the commit, which the first was copying."""
    cloud.answer("scp", "t:rag_jax.tar.gz", do=f"tpu_scripts/sync.sh {other} 2> /dev/null && "
                 f"ls {cloud.root}/rag_jax-*.tar.gz > /dev/null")
    done = cloud.run("sync.sh")
    assert done.returncode == 0, done.stderr
    assert [call[3] for call in cloud.calls()] == ["scp", "scp", "ssh", "ssh"]


def test_sync_of_an_unknown_commit(cloud):
    done = cloud.run("sync.sh", "--commit=nowhere")
    assert done.returncode == 1 and "--commit=nowhere: no such commit" in done.stderr
    shutil.rmtree(cloud.checkout / ".git")  # as of a downloaded archive
    assert "--commit=HEAD: no such commit in a git clone at" in cloud.run("sync.sh").stderr
    assert cloud.calls() == []


def test_run_starts_the_command_on_all_workers(cloud):
    assert cloud.run("run.sh", "python", "-m", "rag_jax.train", "--workdir=a b").returncode == 0
    assert cloud.calls() == [ssh(worker_line("start", "python -m rag_jax.train",
                                             "--workdir=a\\ b"))]


def test_every_argument_of_a_command_survives_the_shells(cloud):
    """The line is read by a shell on the worker: it must give back the same arguments."""
    cloud.run("run.sh", "python", *ODD)
    line = cloud.calls()[0][6].partition("; then ")[2].rpartition("; else ")[0]
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True)
    assert printed.stdout.decode().split("\0")[3:-1] == ["python", *ODD]


def test_status_and_stop(cloud):
    cloud.answer("describe", out="ACTIVE\n")
    done = cloud.run("status.sh", "--lines=7", "--worker=3")
    assert done.stdout == "ACTIVE\n"
    cloud.answer("describe", out="WAITING_FOR_RESOURCES\n")
    assert cloud.run("status.sh").stdout == "WAITING_FOR_RESOURCES\n"
    cloud.run("status.sh", "--follow")
    cloud.run("stop.sh", "--patience=9")
    describe = called("queued-resources", "describe", "t", "--format=value(state.state)")
    assert cloud.calls() == [
        describe, ssh(if_synced("status", "7"), "3"), describe,
        ssh(worker_line("follow", "5"), "0"), ssh(worker_line("stop", "9"))]


def test_fetch_and_delete(cloud):
    assert cloud.run("fetch.sh", *LINES["fetch.sh"]).returncode == 0
    assert cloud.run("delete.sh").returncode == 0
    assert cloud.calls() == [
        ssh(worker_line("log"), "all", "--output-directory=out put/logs"),
        called("tpu-vm", "scp", "t:rag_jax/src/runs/mine/report.json", "out put/mine", "--recurse",
               "--worker=0"),
        called("tpu-vm", "scp", "t:rag_jax/src/runs/a b", "out put/.", "--recurse", "--worker=0"),
        called("queued-resources", "delete", "t", "--force", "--quiet")]
    assert (cloud.checkout / "out put/logs").is_dir()


@pytest.mark.parametrize("script", LINES)
def test_dry_run_prints_what_would_be_run(cloud, script):
    """Nothing runs; and what is printed, given to a shell, does exactly what the script does."""
    done = cloud.run(script, "--dry-run", *LINES[script])
    assert done.returncode == 0 and cloud.calls() == []
    assert not list(cloud.root.glob("*.tar.gz")) and not (cloud.checkout / "out put").exists()
    subprocess.run(["bash", "-e"], input=done.stdout, text=True, check=True, cwd=cloud.checkout,
                   env=cloud.environment())
    printed = cloud.calls()
    if script == "watch.sh":
        cloud.answer("describe", code=1, err="NOT_FOUND")
        cloud.answer("queued-resources", "describe", out="ACTIVE\n")
        cloud.answer("tpu-vm", "describe", out="READY\n")
        cloud.answer("worker.sh state", out="t-w-0: idle\n")
        cloud.answer("queued-resources", "describe", out="FAILED\n")
    elif script == "status.sh":
        cloud.answer("describe", out="ACTIVE\n")
    cloud.run(script, *LINES[script])
    done = cloud.calls()
    if script == "watch.sh":  # looks once more before and after
        done = [done[0], done[1], *done[3:-1]]
    assert printed == done


@pytest.mark.parametrize("script", LINES)
def test_a_failing_gcloud_ends_the_script(cloud, script):
    cloud.answer("compute", err="ERROR: no quota\n", code=3)
    done = cloud.run(script, *LINES[script])
    assert done.returncode != 0 and "no quota" in done.stderr
    assert len(cloud.calls()) == 1


@pytest.mark.parametrize("script", LINES)
def test_which_tpu_must_be_said(cloud, script):
    variables = {"project": "TPU_PROJECT", "zone": "TPU_ZONE", "tpu": "TPU_NAME"}
    for missing, variable in variables.items():
        given = [f"--{name}=x" for name in variables if name != missing]
        done = cloud.run(script, *given, *LINES[script], tpu=False)
        assert done.returncode == 1
        assert f"which {missing}? Give --{missing}=..., or export {variable}=..." in done.stderr
    assert cloud.calls() == []


def test_an_option_goes_before_the_environment(cloud):
    cloud.run("delete.sh", "--tpu=other", "--zone", "elsewhere")
    assert cloud.calls() == [["compute", "tpus", "queued-resources", "delete", "other", "--force",
                              "--quiet", "--project=p", "--zone=elsewhere"]]


@pytest.mark.parametrize("script", LINES)
def test_wrong_options(cloud, script):
    for wrong, said in (("--wrong", "unknown option --wrong;"), ("-w", "unknown option -w;"),
                        ("--wrong=1", "unknown option --wrong=;"),
                        ("--dry-run=yes", "unknown option --dry-run=;"),
                        ("--project", "--project: a value is missing"),
                        ("--project=", "--project: a value is missing"),
                        ("--project --dry-run", "--project: a value is missing")):
        done = cloud.run(script, *wrong.split())
        assert done.returncode == 1 and said in done.stderr, wrong
    assert cloud.calls() == []


@pytest.mark.parametrize("script, arguments, said", [
    ("create.sh", [], "which accelerator?"),
    ("create.sh", ["--accelerator=v5e-8"], "v5litepod-N (v5e)"),
    ("create.sh", ["--runtime=mine"], "which accelerator?"),
    ("sync.sh", ["HEAD"], "unexpected argument HEAD"),
    ("setup.sh", ["x"], "unexpected argument x"),
    ("status.sh", ["--lines=all"], "--lines=all: a number"),
    ("stop.sh", ["--patience=-1"], "--patience=-1: a number"),
    ("fetch.sh", [], "which files?"),
    ("fetch.sh", ["runs/a", "--dry-run"], "--dry-run: options go before PATH"),
    ("run.sh", [], "the command is missing"),
    ("watch.sh", ["--accelerator=v4-8"], "the command is missing"),
    ("watch.sh", ["--poll=often", "x"], "--poll=often: a number"),
    ("watch.sh", ["--restarts=x", "x"], "--restarts=x: a number"),
    ("run.sh", ["python", "--workdir=gs://b/x"], "gs://b/x: rag_jax writes files"),
    ("watch.sh", ["python", "--workdir", "gs://b/x"], "gs://b/x: rag_jax writes files"),
    ("run.sh", ["python", "--out", "gs://b/y"], "gs://b/y: rag_jax writes files"),
    ("run.sh", ["tpu_scripts/natural_questions.sh", "gs://b/x"], "gs://b/x: rag_jax writes files"),
    ("natural_questions.sh", [], "which workdir?"),
    ("natural_questions.sh", ["gs://b/x"], "gs://b/x: rag_jax writes files"),
])
def test_what_is_refused(cloud, script, arguments, said):
    done = cloud.run(script, *arguments)
    assert done.returncode == 1 and said in done.stderr and cloud.calls() == []


def test_run_says_how_to_end_a_half_started_command(cloud):
    cloud.answer("start", code=1)
    done = cloud.run("run.sh", "true")
    assert done.returncode == 1 and "tpu_scripts/stop.sh ends it" in done.stderr


def test_without_gcloud(cloud):
    """Told at once, and no obstacle to a dry run."""
    (cloud.bin / "gcloud").unlink()
    for tool in ("bash", "dirname", "env"):
        (cloud.bin / tool).symlink_to(shutil.which(tool))
    done = cloud.run("delete.sh", PATH=str(cloud.bin))
    assert done.returncode == 1 and "gcloud is not installed" in done.stderr
    assert cloud.run("delete.sh", "--dry-run", PATH=str(cloud.bin)).returncode == 0


def test_a_search_path_of_cd_changes_nothing(cloud):
    """An exported CDPATH had the folder of the scripts twice, and what they called not found."""
    line = ["tpu_scripts/sync.sh", "--dry-run", "--project=p", "--zone=z", "--tpu=t"]
    printed = [subprocess.run(line, cwd=cloud.checkout, env=cloud.environment(**extra), text=True,
                              capture_output=True, check=True).stdout
               for extra in ({}, {"CDPATH": "."})]
    assert printed[0] == printed[1]


@pytest.mark.parametrize("script", [*LINES, "natural_questions.sh"])
def test_help_names_every_option(cloud, script):
    done = cloud.run(script, "--help", tpu=False)
    assert done.returncode == 0 and done.stdout.startswith(done.stdout.lstrip("# \n"))
    names = re.search(r'^parse\w*_options "(.*?)"', (SCRIPTS / script).read_text(), re.M)[1].split()
    if script != "natural_questions.sh":
        names += ["project=", "zone=", "tpu="]
    for name in [*names, "dry-run"]:
        assert f"--{name}" in done.stdout, name


def test_shellcheck():
    """Every script is clean, warnings and style included."""
    program = shutil.which("shellcheck", path=Path(sys.executable).parent) or shutil.which(
        "shellcheck")
    assert program, "no shellcheck: pip install -e '.[test]'"
    scripts = sorted(SCRIPTS.glob("*.sh"))
    done = subprocess.run([program, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert all("set -euo pipefail" in path.read_text() or "/lib.sh" in path.read_text()
               for path in scripts)


def test_commands_of_the_documents():
    """Command lines of the pages name scripts and options that exist."""
    for document in (SCRIPTS / "README.md", SCRIPTS.parent / "docs/hosts.md"):
        blocks = re.findall(r"^```\n(.*?)^```", document.read_text(), re.S | re.M)
        lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
        lines = [line for line in lines if line.startswith("tpu_scripts/")]
        assert lines, document
        for line in lines:
            script, *words = shlex.split(line, comments=True)
            known = (SCRIPTS.parent / script).read_text().split("\nsource ")[0]
            for word in words:
                if not word.startswith("--"):
                    break  # the command for the workers
                assert word.split("=")[0] in known, line
