"""The paper's experiments at full size, each by its cell: TABLE/TASK/RUN after the file's name.

    python -m rag_jax.train --config=configs/paper.py:table1/nq/rag_token --help
    python -m rag_jax.train --config=configs/paper.py:table1/nq/rag_token --workdir=runs/paper/nq

The first command says what the cell costs and scores in the paper; without a cell the error lists
all 46. TASK/RUN alone, such as nq/fid, is any task with any run of config.runs, also one that the
paper has no number of.

Hardware: a TPU v4-8. Time: from 0.1 to 4.4 hours of the chips' peak speed.

The paper publishes no learning rate, batch size, number of steps or lengths. Question answering has
the first three of Hugging Face's finetune_rag.sh (100 epochs in batches of 64). For generation we
take 10 epochs of the same, and for FEVER BART's recipe of classification tasks (10 epochs, 1e-5),
with the labels as single tokens (section 3.4); appendix E's classification head in their place is
`--config.model.head=classification`. Epochs are counted in questions: where each answer trains on
its own (Natural Questions, WebQuestions), all of them are seen less often. The lengths are ours:
room for 100 words and the question.
"""

import dataclasses

from rag_jax.config import (
    BART_PRESETS,
    BERT_PRESETS,
    EVAL_PRESETS,
    RUNS,
    Config,
    ConfigError,
    DataConfig,
    EncoderSource,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RagSource,
    RetrievalConfig,
    TrainConfig,
)
from rag_jax.errors import near_matches
from rag_jax.paper import CELLS, COLUMNS, FROM_NQ, OURS

PASSAGES = "runs/dpr/psgs_w100.tsv.gz"  # 21,015,324 chunks of 100 words, December 2018
QUERY_ENCODER = "facebook/dpr-question_encoder-single-nq-base"
DOCUMENT_ENCODER = "facebook/dpr-ctx_encoder-single-nq-base"
BATCH = 64
SPLITS = ("train", "dev", "test")


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: its name as a source, training questions, epochs of them, target tokens, labels,
    metrics."""

    source: str
    questions: int
    epochs: int = 100
    target: int = 32
    learning_rate: float = 3e-5
    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("qa",)
    test: bool = True  # MS-MARCO's test answers are hidden

    @property
    def steps(self) -> int:
        return self.questions * self.epochs // BATCH


TASKS = {
    "nq": Task("natural_questions", 79168),
    "tqa": Task("trivia_qa", 78785),
    "wq": Task("web_questions", 3417),
    "ct": Task("curated_trec", 1353, metrics=("regex",)),
    "jeopardy": Task("jeopardy", 97391, epochs=10, target=64, metrics=("jeopardy",)),
    "msmarco": Task("ms_marco", 153725, epochs=10, target=96, metrics=("ms_marco",),
                    test=False),
    "fever3": Task("fever3", 145449, epochs=10, target=16, learning_rate=1e-5,
                   labels=("SUPPORTS", "REFUTES", "NOT ENOUGH INFO"), metrics=("fever",)),
    "fever2": Task("fever2", 109810, epochs=10, target=16, learning_rate=1e-5,
                   labels=("SUPPORTS", "REFUTES"), metrics=("fever",)),
}
# At least so long on a v4-8: the operations of all training steps at the chips' peak speed; by the
# run's retriever: DPR that trains, DPR that is frozen, BM25, none.
HOURS = {
    "nq": {"rag": 4.4, "frozen": 4.4, "bm25": 4.3},
    "tqa": {"rag": 4.4, "frozen": 4.3, "bm25": 4.3},
    "wq": {"rag": 0.2, "frozen": 0.2, "bm25": 0.2},
    "ct": {"rag": 0.1, "frozen": 0.1, "bm25": 0.1},
    "jeopardy": {"rag": 0.6, "frozen": 0.6, "bm25": 0.6, "closed": 0.1},
    "msmarco": {"rag": 1.1, "frozen": 1.1, "bm25": 1.1, "closed": 0.2},
    "fever3": {"rag": 0.7, "frozen": 0.7, "bm25": 0.7, "closed": 0.1},
    "fever2": {"rag": 0.5, "frozen": 0.5, "bm25": 0.5, "closed": 0.1},
}
ABOUT = """\
{table}, {task}, {run}: {scores} on {split}.

{convert}    python -m rag_jax.train --config=configs/paper.py:{cell} \\
        --workdir={workdir}

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: {steps:,} steps of
{batch} questions; at least {hours:.1f} hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.{hidden}"""
CONVERT = """\
    test -d runs/paper/nq/exported_{run} || python -m rag_jax.convert \\
        --from=runs/paper/nq --run={run} --to=runs/paper/nq/exported_{run}
"""
HIDDEN = "\n\nThe answers of MS-MARCO's test set are hidden: dev alone can be measured."


def _decoding(task: str, run: str) -> EvalConfig:
    """Appendix A; of FEVER the paper does not say how many passages."""
    if TASKS[task].labels:
        return EvalConfig(k=5, labels=TASKS[task].labels)
    if task in ("jeopardy", "msmarco"):
        return EVAL_PRESETS["paper-generation"]
    return EVAL_PRESETS["paper-qa-sequence" if RUNS[run].kind == "sequence" else "paper-qa-token"]


def full_size(task: str, run: str) -> Config:
    """The configuration of a cell: one of TASKS, one of `config.RUNS`."""
    chosen = TASKS[task]
    large = {"dtype": "bfloat16", "scan_layers": True, "remat": "full"}
    retriever = dataclasses.replace(BERT_PRESETS["bert-base"], **large)
    generator = dataclasses.replace(BART_PRESETS["bart-large"], **large)
    first, query_encoder = "", QUERY_ENCODER
    source = "facebook/bart-large"
    if task in FROM_NQ:
        source = f"runs/paper/nq/exported_{run}"
        if not run.startswith("bm25"):  # whose export is a generator alone
            first, query_encoder, source = source, "", ""
    generator = dataclasses.replace(generator, pretrained=source)
    return Config(
        runs=(run,),
        data=DataConfig(
            passages=PASSAGES,
            **{split: f"task:{chosen.source}:{split}" for split in SPLITS[: 2 + chosen.test]},
            max_question_length=64, max_passage_length=256, max_source_length=256,
            max_target_length=chosen.target),
        model=ModelConfig(
            head="label_token" if chosen.labels else "none",
            retriever=retriever, generator=generator, rag=RagSource(first),
            query_encoder=EncoderSource(query_encoder),
            document_encoder=EncoderSource(DOCUMENT_ENCODER)),
        retrieval=RetrievalConfig(k=5, embed_batch_size=1024),
        train=TrainConfig(
            steps=chosen.steps, batch_size=BATCH, label_smoothing=0.1,
            eval_every=min(5000, chosen.steps), save_every=500,
            query_encoder_rate=RUNS[run].sets.get("train.query_encoder_rate", 1.0),
            full_information=0.0, in_batch_negatives=False,
            optimizer=OptimizerConfig(
                learning_rate=chosen.learning_rate, schedule="polynomial", warmup_steps=500,
                weight_decay=0.001, clip_norm=0.1, b2=0.999)),
        eval=dataclasses.replace(_decoding(task, run), metrics=chosen.metrics),
    )


def describe(cell: str) -> str:
    """What `--config=configs/paper.py:CELL --help` says: commands, cost, the paper's score."""
    if cell not in CELLS:
        return __doc__
    table, task, run = cell.split("/")
    further = task in FROM_NQ
    split = "dev" if table == "table6" else "test"
    return ABOUT.format(
        cell=cell, table=table.replace("table", "Table "), task=COLUMNS[task], run=OURS[run],
        scores=" and ".join(f"{score} {COLUMNS[name]}" for name, score in CELLS[cell].items()),
        split=split,
        convert=CONVERT.format(run=run) if further else "",
        workdir=f"runs/paper/{task}_{run}" if further else f"runs/paper/{task}",
        steps=TASKS[task].steps, batch=BATCH, hours=HOURS[task][run.partition("_")[0]],
        hidden=HIDDEN if split == "test" and not TASKS[task].test else "")


def _listed() -> str:
    """All cells; those of a table with the same runs in one line."""
    tasks: dict[tuple[str, str], list[str]] = {}
    for table, task in dict.fromkeys(tuple(cell.split("/")[:2]) for cell in CELLS):
        runs = ",".join(cell.split("/")[2] for cell in CELLS if cell.startswith(f"{table}/{task}/"))
        tasks.setdefault((table, runs), []).append(task)
    return "\n".join(f"  {table}/{{{','.join(names)}}}/{{{runs}}}"
                     for (table, runs), names in tasks.items())


def get_config(cell: str = "") -> Config:
    task, _, run = (cell.partition("/")[2] if cell in CELLS else cell).partition("/")
    if task not in TASKS or run not in RUNS:
        wrong = (f":{cell}: no cell {cell!r}; {near_matches(cell, CELLS)}" if cell
                 else ": name a cell after ':'")
        raise ConfigError(f"--config=configs/paper.py{wrong}\nThe cells of "
                          f"the paper's tables:\n{_listed()}\nor TASK/RUN, with a task of "
                          f"{', '.join(TASKS)} and a run of {', '.join(RUNS)}")
    return full_size(task, run)
