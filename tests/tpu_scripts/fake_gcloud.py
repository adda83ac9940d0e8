"""A gcloud for tests: it notes its arguments, and answers what it was told or acts on folders.

$FAKE_GCLOUD/
  calls.jsonl    the arguments of every call
  answers.json   answers not yet given; a call takes the first whose words its arguments contain
  workers/N/     home of worker N: where no answer is left, ssh runs its command there, scp copies
"""

import json
import os
import sys

ROOT = os.environ["FAKE_GCLOUD"]


def main(argv: list[str]) -> int:
    with open(f"{ROOT}/calls.jsonl", "a") as file:
        file.write(json.dumps(argv) + "\n")
    with open(f"{ROOT}/answers.json") as file:
        answers = json.load(file)
    for number, answer in enumerate(answers):
        if all(any(word in argument for argument in argv) for word in answer["words"]):
            del answers[number]
            with open(f"{ROOT}/answers.json", "w") as file:
                json.dump(answers, file)
            if answer["do"] and os.system(answer["do"]):
                return 99
            sys.stdout.write(answer["out"])
            sys.stderr.write(answer["err"])
            return answer["code"]
    return act(argv)


def act(argv: list[str]) -> int:
    flags = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("--"))
    positional = [word for word in argv if not word.startswith("--")]
    homes = sorted(os.listdir(f"{ROOT}/workers"))
    if flags.get("worker", "all") != "all":
        homes = [home for home in homes if home == flags["worker"]]
    if "ssh" in argv:
        return max((ssh(home, flags) for home in homes), default=0)
    if "scp" in argv:
        for home in homes:
            *sources, target = (local(home, path) for path in positional[4:])
            for source in sources:
                copy(source, target)
    return 0


def ssh(home: str, flags: dict[str, str]) -> int:
    import subprocess  # a third of this program's time, which few calls need

    place = f"{ROOT}/workers/{home}"
    done = subprocess.run(["bash", "-c", flags["command"]], cwd=place, capture_output=True,
                          env={**os.environ, "HOME": place, "FAKE_HOST": f"t-w-{home}"}, text=True,
                          stdin=subprocess.DEVNULL)
    if "output-directory" in flags:
        with open(f"{flags['output-directory']}/{home}.log", "w") as file:
            file.write(done.stdout)
    else:
        sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


def local(home: str, path: str) -> str:
    host, colon, rest = path.partition(":")
    return f"{ROOT}/workers/{home}/{rest}" if colon else path


def copy(source: str, target: str) -> None:
    import shutil

    if os.path.isdir(target):
        target = os.path.join(target, os.path.basename(source))
    (shutil.copytree if os.path.isdir(source) else shutil.copy)(source, target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
