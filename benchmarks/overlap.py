"""How much of the host's search is hidden behind the devices' work, with staleness 0 and 1.

    python benchmarks/overlap.py [--passages 100000] [--steps 40] [--json FILE]

A small RAG with random passages and embeddings trains by the loop itself, its passages found by
exact search on the host. Hidden is the time of searches during which a step ran, as a share of all
searches; the first steps, which compile, are left out. It is measured twice in the same run: by the
host's clock, which says when each search began and ended, when each step was dispatched, and, in a
thread that waits for its metrics, when it was done; and in the profiler's trace (kept with
--trace=FOLDER), where a step runs from the begin of its first operation to the end of its last.
"""

import argparse
import collections
import dataclasses
import functools
import pathlib
import queue
import tempfile
import threading
import time
from typing import Any

import jax
import numpy as np

from rag_jax import files, parallel, process
from rag_jax.config import Config
from rag_jax.config.overrides import replace
from rag_jax.data.batches import PASSAGE_TABLE, RagBatcher
from rag_jax.data.prepared import Prepared
from rag_jax.data.question_files import Example
from rag_jax.data.text import GeneratorFormat
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.retrieval.build import build_index
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.protocol import Passage
from rag_jax.retrieval.shards import PassageEmbedder
from rag_jax.retrieval.store_writing import write_store
from rag_jax.searching import jit_embed, search
from rag_jax.text_table import print_table
from rag_jax.training.fine_tuning import rag_stage
from rag_jax.training.job import Job
from rag_jax.training.loop import run_stage
from rag_jax.training.sources import RagSource, finder

SKIPPED = 5  # steps
SEARCH, STEP = "search", "step"
PROGRAM = "jit_step"  # what XLA calls the training step


class Clock:
    """Intervals (what, begin, end) in seconds."""

    def __init__(self):
        self.intervals: list[tuple[str, float, float]] = []
        self._waiting: queue.Queue = queue.Queue()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        free = 0.0  # a device works on one step after the other
        while True:
            began, metrics = self._waiting.get()
            jax.block_until_ready(metrics)
            free, began = time.perf_counter(), max(free, began)
            self.intervals.append((STEP, began, free))
            self._waiting.task_done()

    def step(self, train_step: Any) -> Any:
        """The step, timed from its dispatch until it is done."""

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            state, metrics = train_step(*arguments)
            self._waiting.put((began, metrics))
            return state, metrics

        return timed

    def search(self, search: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            with jax.profiler.TraceAnnotation(SEARCH):
                found = search(*arguments)
            self.intervals.append((SEARCH, began, time.perf_counter()))
            return found

        return timed

    def of(self, what: str) -> list[tuple[float, float]]:
        """The intervals of one kind, all of them ended."""
        self._waiting.join()
        return [(begin, end) for kind, begin, end in self.intervals if kind == what]


def small_job(folder: pathlib.Path, passages: int, steps: int) -> tuple[Job, PassageIndex]:
    """A job of random questions, and an index of random passages."""
    config = replace(Config(), {
        **{f"model.{tower}{field}": value for tower in ("retriever", "generator")
           for field, value in (("", "tiny"), (".width", 256), (".mlp_width", 1024))},
        "data.max_source_length": 64, "data.max_question_length": 24,
        "train.steps": steps, "train.batch_size": 16, "train.save_every": steps})
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abdelmnorst"), 4)) for _ in range(2000)]
    texts = [" ".join(rng.choice(words, 30)) for _ in range(500)]
    tokenizers = train_bert_tokenizer(texts, 2000), train_bart_tokenizer(texts, 2000)
    format = GeneratorFormat(tokenizers[1], config.data.max_source_length)
    store = write_store(
        folder / "store", (Passage(str(i), "", texts[i % len(texts)]) for i in range(passages)),
        {PASSAGE_TABLE: lambda ps: format.passages([""] * len(ps), [p.text for p in ps])})
    embedder = PassageEmbedder(
        lambda ids, mask: rng.standard_normal((len(ids), 256)).astype(np.float32),
        token_table=PASSAGE_TABLE, encoder_fingerprint="random", max_length=8, batch_size=1024,
        length_buckets=(8,), progress=False)
    index = build_index(store, embedder, folder / "index", kind="exact")
    examples = [Example(str(i), " ".join(rng.choice(words, 8)), (str(rng.choice(words)),))
                for i in range(1000)]
    prepared = Prepared(*tokenizers, format, {"random": store}, {"train": examples})
    return Job(config, folder, prepared, parallel.make_mesh(config.mesh)), index


Intervals = list[tuple[float, float]]


def hidden(searches: Intervals, steps: Intervals) -> float:
    """The share of the time of searches, less the first ones, during which a step ran."""
    counted = sorted(searches)[SKIPPED:]
    both = sum(max(0.0, min(end, done) - max(begin, start))
               for begin, end in counted for start, done in steps)
    return both / sum(end - begin for begin, end in counted)


def traced(folder: pathlib.Path) -> tuple[Intervals, Intervals]:
    """Searches and steps in nanoseconds, from the profiler's trace in a folder."""
    (file,) = folder.rglob("*.xplane.pb")
    searches, operations = [], collections.defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for event in (event for line in plane.lines for event in line.events):
            if event.name == SEARCH:
                searches.append((event.start_ns, event.start_ns + event.duration_ns))
                continue
            stats = dict(event.stats)
            if stats.get("hlo_module") == PROGRAM:
                operations[stats["run_id"]] += [
                    event.start_ns, event.start_ns + event.duration_ns]
    return searches, [(min(times), max(times)) for times in operations.values()]


def timed_training(job: Job, index: PassageIndex, staleness: int, trace: pathlib.Path
                   ) -> dict[str, float]:
    """Trains from scratch; mean seconds, and the share of search that is hidden."""
    clock, config = Clock(), job.config
    find = clock.search(functools.partial(search, index, k=config.retrieval.k))
    questions = job.tokens("train")
    begin = finder(job.model, jit_embed(job.model), find, questions, job.mesh,
                   config.data.max_source_length)
    batcher = RagBatcher(questions, config.data.max_source_length, job.model.embedding_width)
    source = RagSource(batcher, index, begin, config.train.batch_size, config.seed, staleness,
                       job.mesh)
    stage = rag_stage(job, f"staleness_{staleness}", source, None, meta={})
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(trace, profiler_options=options):
        run_stage(dataclasses.replace(stage, train_step=clock.step(stage.train_step)))
        searches, steps = clock.of(SEARCH), clock.of(STEP)
    in_trace = traced(trace)
    assert len(in_trace[0]) == len(searches) and len(in_trace[1]) == len(steps)
    counted = steps[SKIPPED:]
    return {"search_secs": float(np.mean([end - begin for begin, end in searches[SKIPPED:]])),
            "step_secs": float(np.mean([end - begin for begin, end in counted])),
            "secs_from_step_to_step": (counted[-1][1] - counted[0][1]) / (len(counted) - 1),
            "hidden": hidden(searches, steps), "hidden_in_trace": hidden(*in_trace)}


def main() -> None:
    process.keep_memory()
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path)
    parser.add_argument("--trace", metavar="FOLDER", help="keep the profiler's traces there")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        job, index = small_job(pathlib.Path(folder), options.passages, options.steps)
        for staleness in (0, 1):
            trace = pathlib.Path(options.trace or folder) / f"trace_{staleness}"
            found[staleness] = timed_training(job, index, staleness, trace)
    rows = [[f"staleness {staleness}", *(f"{value:.3f}" for value in one.values())]
            for staleness, one in found.items()]
    print(print_table(rows, ["", *(name.replace("_", " ") for name in found[0])]))
    if options.json:
        files.write_json(options.json, found)


if __name__ == "__main__":
    main()
