r"""Your own passages and questions, from nothing but a CPU: small models, trained from scratch.

    python -m rag_jax.train --config=configs/own_data.py --workdir=runs/mine \
        --config.data.passages=passages.tsv --config.data.train=train.jsonl \
        --config.data.dev=dev.jsonl --config.data.test=test.jsonl

Hardware: 2 CPU cores, 8 GB of memory. Time: about 25 minutes for 3,000 passages and 5,000
questions; retrieval learns well, while a generator needs pretraining to answer freely.
"""

import dataclasses

from rag_jax.config import (
    BART_PRESETS,
    BERT_PRESETS,
    Config,
    DataConfig,
    EvalConfig,
    GeneratorWarmupConfig,
    ModelConfig,
    OptimizerConfig,
    RetrievalConfig,
    RetrieverWarmupConfig,
    TrainConfig,
)


def get_config() -> Config:
    # No dropout: on a CPU drawing its masks costs more than the step itself.
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0}
    return Config(
        runs=("rag_token",),
        data=DataConfig(chunk_words=100, generator_vocab=8192, retriever_vocab=8192,
                        max_question_length=48, max_passage_length=192, max_source_length=256,
                        max_target_length=24),
        model=ModelConfig(
            retriever=dataclasses.replace(BERT_PRESETS["tiny"], layers=1, width=256, heads=8,
                                          mlp_width=1024, init_std=0.0625, **no_dropout),
            generator=dataclasses.replace(BART_PRESETS["tiny"], width=256, heads=8,
                                          mlp_width=1024, encoder_layers=1, decoder_layers=1,
                                          init_std=0.0625, **no_dropout)),
        retrieval=RetrievalConfig(k=5),
        retriever_warmup=RetrieverWarmupConfig(
            steps=800, batch_size=64,
            optimizer=OptimizerConfig(learning_rate=5e-4, schedule="linear", warmup_steps=100)),
        generator_warmup=GeneratorWarmupConfig(
            steps=1000, batch_size=16,
            optimizer=OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=100)),
        train=TrainConfig(
            steps=1000, batch_size=8, eval_every=250, save_every=250,
            optimizer=OptimizerConfig(learning_rate=5e-4, schedule="linear", warmup_steps=50)),
        eval=EvalConfig(batch_size=16),
    )
