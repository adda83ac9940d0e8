"""The main job: learn to answer questions about countries, on a laptop CPU.

    python -m rag_jax.train                      # this file, workdir runs/quickstart

Hardware: 2 CPU cores, 4 GB of memory. Time: 6 to 15 minutes, by the cores. The report at the end
compares RAG-Token, RAG-Sequence, a frozen retriever, a closed-book generator and shuffled passages
on 40 countries that no question and no answer of training names, and swaps the 2018 index for the
2016 one.
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
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0}  # 34,000 fresh questions: no overfit
    return Config(
        runs=("rag_token", "rag_sequence", "frozen", "closed_book"),
        data=DataConfig(
            fictional_countries=1600,
            generator_vocab=2048,
            retriever_vocab=600,
            max_question_length=28,
            max_passage_length=48,
            max_source_length=64,  # one input in 600 loses the end of its passage
            max_target_length=16,
            length_buckets=40,
            world_cards="cloze",
        ),
        model=ModelConfig(
            retriever=dataclasses.replace(BERT_PRESETS["tiny"], layers=1, **no_dropout),
            generator=dataclasses.replace(
                BART_PRESETS["tiny"], width=256, heads=8, mlp_width=512, encoder_layers=1,
                decoder_layers=1, init_std=0.0625, logit_chunk=64, **no_dropout),
        ),
        retrieval=RetrievalConfig(k=2, where="device", embed_batch_size=256),
        retriever_warmup=RetrieverWarmupConfig(
            pairs="words", steps=1000, save_every=1000, batch_size=128,
            optimizer=OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=50)),
        generator_warmup=GeneratorWarmupConfig(
            steps=900, save_every=900, batch_size=32, permute_sentences=0.0, mask_ratio=0.35,
            optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=50,
                                      end_fraction=0.1)),
        train=TrainConfig(
            steps=260, batch_size=64, eval_every=260, save_every=260, query_encoder_rate=0.2,
            retriever_objective="emdr2",
            document_encoder="refresh", document_encoder_rate=0.2, refresh_every=25,
            optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=20,
                                      end_fraction=0.05)),
        eval=EvalConfig(k=5, batch_size=64, max_examples=128),
    )
