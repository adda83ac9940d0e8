"""The paper's experiments at full size, for the files of its tables' cells; or by TASK/RUN:

    python -m rag_jax.train --config=configs/recipe.py:nq/rag_token --workdir=runs/paper/nq

The paper publishes no learning rate, batch size, lengths or number of steps. Question answering
has those of Hugging Face's finetune_rag.sh (100 epochs in batches of 64). For generation we take
10 epochs of the same, and for FEVER BART's recipe of classification tasks (10 epochs, 1e-5), with
the labels as single tokens (section 3.4); appendix E's classification head in their place is
`--config.model.head=classification`.
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

PASSAGES = "runs/dpr/psgs_w100.tsv.gz"  # 21,015,324 chunks of 100 words, December 2018
QUERY_ENCODER = "facebook/dpr-question_encoder-single-nq-base"
DOCUMENT_ENCODER = "facebook/dpr-ctx_encoder-single-nq-base"
BATCH = 64
SPLITS = ("train", "dev", "test")


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: its name as a source, training questions, epochs, target tokens, labels, metrics."""

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
FROM_NQ = ("wq", "ct")  # start from the same system trained on Natural Questions (section 3.1)


def _decoding(task: str, run: str) -> EvalConfig:
    """Appendix A; of FEVER the paper does not say how many passages."""
    if TASKS[task].labels:
        return EvalConfig(k=5, labels=TASKS[task].labels)
    if task in ("jeopardy", "msmarco"):
        return EVAL_PRESETS["paper-generation"]
    return EVAL_PRESETS["paper-qa-sequence" if "sequence" in run else "paper-qa-token"]


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
            optimizer=OptimizerConfig(
                learning_rate=chosen.learning_rate, schedule="polynomial", warmup_steps=500,
                weight_decay=0.001, clip_norm=0.1, b2=0.999)),
        eval=dataclasses.replace(_decoding(task, run), metrics=chosen.metrics),
    )


def get_config(cell: str = "nq/rag_token") -> Config:
    task, _, run = cell.partition("/")
    if task not in TASKS or run not in RUNS:
        raise ConfigError(f"configs/recipe.py:{cell}: expected TASK/RUN with a task of "
                          f"{', '.join(TASKS)} and a run of {', '.join(RUNS)}")
    return full_size(task, run)
