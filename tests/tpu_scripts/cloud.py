"""A checkout with the scripts, and a cloud that is a folder."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
SCRIPTS = HERE.parents[1] / "tpu_scripts"


class Cloud:
    """Runs scripts of a checkout of its own, new or a copy, against a fake gcloud."""

    def __init__(self, root: pathlib.Path, checkout: pathlib.Path | None = None):
        self.root, self.checkout, self.bin = root, root / "checkout", root / "bin"
        self.answers = []
        (root / "workers").mkdir()
        self.bin.mkdir()
        fake = HERE / "fake_gcloud.py"
        self.program("gcloud", f'exec "{sys.executable}" -ISE "{fake}" "$@"')
        self.program("hostname", 'echo "${FAKE_HOST-t-w-0}"')
        if checkout:
            shutil.copytree(checkout, self.checkout)
        else:
            shutil.copytree(SCRIPTS, self.checkout / "tpu_scripts")
            self.git("init", "--quiet", "--template=")
            self.commit()

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "GIT_"))}
        return {**kept, "PATH": f"{self.bin}:{kept['PATH']}", "FAKE_GCLOUD": str(self.root),
                "GIT_CONFIG_GLOBAL": os.devnull, "TMPDIR": str(self.root), **extra}

    def git(self, *arguments: str) -> str:
        author = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(["git", "-C", self.checkout, *author, *arguments], check=True,
                              env=self.environment(), capture_output=True, text=True).stdout

    def commit(self) -> str:
        """Commits everything; returns the hash."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message=t")
        return self.git("rev-parse", "HEAD").strip()

    def program(self, name: str, body: str) -> None:
        """A bash program that takes the place of another on PATH."""
        (self.bin / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (self.bin / name).chmod(0o755)

    def worker(self) -> pathlib.Path:
        """One worker more; returns its home."""
        homes = self.root / "workers"
        home = homes / str(len(list(homes.iterdir())))
        home.mkdir()
        return home

    def answer(self, *words: str, out: str = "", err: str = "", code: int = 0, do: str = ""):
        """What gcloud answers once to a call with these words, after running `do`."""
        self.answers.append({"words": words, "out": out, "err": err, "code": code, "do": do})

    def run(self, script: str, *arguments: str, tpu: bool = True, **extra: str):
        """Runs a script; `tpu` tells it the project p, zone z and TPU t."""
        (self.root / "answers.json").write_text(json.dumps(self.answers))
        self.answers = []
        which = {"TPU_PROJECT": "p", "TPU_ZONE": "z", "TPU_NAME": "t"} if tpu else {}
        return subprocess.run([self.checkout / "tpu_scripts" / script, *arguments],
                              cwd=self.checkout, env=self.environment(**which, **extra),
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)

    def calls(self) -> list[list[str]]:
        """Arguments of the gcloud calls since the last look."""
        file = self.root / "calls.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


def called(group: str, verb: str, *arguments: str) -> list[str]:
    """The arguments of gcloud that a script gives for TPU t in zone z of project p."""
    return ["compute", "tpus", group, verb, *arguments, "--project=p", "--zone=z"]


def worker_line(*arguments: str) -> str:
    return _worker_or('echo "$(hostname): there is no code yet (tpu_scripts/sync.sh)" >&2; exit 1',
                      *arguments)


def if_synced(*arguments: str) -> str:
    return _worker_or('echo "$(hostname): idle"', *arguments)


def _worker_or(line: str, *arguments: str) -> str:
    script = " ".join(("bash rag_jax/src/tpu_scripts/worker.sh", *arguments))
    return f"if [ -e rag_jax/src/tpu_scripts ]; then {script}; else {line}; fi"
