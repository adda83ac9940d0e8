"""A folder of mixed documents to an index, again unchanged, and whether citations are right.

    python benchmarks/documents.py [--files 1000] [--planted 500]

Makes the folders itself (tests/documents/made_files.py). Seconds are of whole commands, beside the
CPU seconds of all their processes.
"""

import argparse
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "documents")]

import made_files  # noqa: E402

from rag_jax.documents.read import read  # noqa: E402
from rag_jax.ingestion import ingest  # noqa: E402
from rag_jax.retrieval.bm25 import Bm25Index  # noqa: E402


def command(folder: pathlib.Path, workdir: pathlib.Path) -> tuple[float, float, str]:
    """Seconds and CPU seconds of `rag_jax.ingest`, and the first line that it prints."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "rag_jax.ingest", str(folder), "--workdir",
                           str(workdir)], check=True, capture_output=True, text=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu, done.stdout.partition("\n")[0]


def citations(folder: pathlib.Path, workdir: pathlib.Path, count: int) -> dict[str, list[bool]]:
    """By kind of file: of each planted sentence, whether the passage that holds it and is found by
    it cites its page or heading, and a span in which it stands."""
    planted = made_files.planted(folder, count)
    ingest(folder, workdir)
    index = Bm25Index.open(workdir / "index")
    texts, right = {}, {}
    for one in planted:
        row = int(index.search([one.sentence], 1).ids[0, 0])
        passage, source = index.passages[row], index.passages.source(row)
        if source.file not in texts:
            texts[source.file] = read(folder / source.file).text
        spanned = " ".join(texts[source.file][slice(*source.span)].split())
        place = one.page in source.pages if one.page else one.heading in source.headings
        right.setdefault(one.file.rpartition(".")[2], []).append(
            source.file == one.file and place and one.sentence in spanned
            and spanned == passage.text)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--planted", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "documents"
        made_files.folder(folder, options.files)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{options.files} files, {size / 1e6:.1f} MB")
        for what in ("first run", "second run, unchanged"):
            secs, cpu, line = command(folder, pathlib.Path(scratch) / "run")
            print(f"{what}: {secs:.1f} s, {cpu:.1f} CPU s;{line.partition(':')[2]}", flush=True)
        (pathlib.Path(scratch) / "planted").mkdir()
        right = citations(pathlib.Path(scratch) / "planted", pathlib.Path(scratch) / "cited",
                          options.planted)
        for kind, each in right.items():
            print(f"planted in {kind}: {sum(each)} of {len(each)} cited right")
        everyone = [one for each in right.values() for one in each]
        print(f"all: {100 * sum(everyone) / len(everyone):.1f} %")


if __name__ == "__main__":
    main()
