"""The paper's main experiment: BERT-base and BART-large over Wikipedia, on a TPU slice.

    tpu_scripts/natural_questions.sh runs/nq        # this file with the downloaded data

Hardware: a v4-8 or v5e-8 slice, or larger; tpu_scripts/README.md has memory, time and cost, from
    python -m rag_jax.compile_report --config=configs/paper_scale.py --topology=v5e:2x4
The paper publishes no learning rate, batch size or number of steps: these are those of Hugging
Face's finetune_rag.sh, 100 epochs of Natural Questions' 79,168 questions in batches of 64.
"""

import dataclasses

from rag_jax.config import (
    BART_PRESETS,
    BERT_PRESETS,
    Config,
    DataConfig,
    EncoderSource,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RetrievalConfig,
    TrainConfig,
)


def get_config() -> Config:
    # Layers that compile once and recompute their states: what makes 16 GB enough.
    large = {"dtype": "bfloat16", "scan_layers": True, "remat": "full"}
    return Config(
        runs=("rag_token", "rag_sequence"),
        data=DataConfig(max_question_length=64, max_passage_length=256, max_source_length=256,
                        max_target_length=32),
        model=ModelConfig(
            retriever=dataclasses.replace(BERT_PRESETS["bert-base"], **large),
            generator=dataclasses.replace(BART_PRESETS["bart-large"],
                                          pretrained="facebook/bart-large", **large),
            query_encoder=EncoderSource("facebook/dpr-question_encoder-single-nq-base"),
            document_encoder=EncoderSource("facebook/dpr-ctx_encoder-single-nq-base")),
        # The paper searches with the parameters of the very step (staleness=0), and the devices
        # wait. Here the passages are those that the parameters of one step earlier find; their
        # scores and gradients are not stale, and a search shorter than a step is hidden.
        retrieval=RetrievalConfig(k=5, embed_batch_size=1024, staleness=1),
        train=TrainConfig(
            steps=123_700, batch_size=64, label_smoothing=0.1, eval_every=5000, save_every=500,
            optimizer=OptimizerConfig(learning_rate=3e-5, schedule="polynomial", warmup_steps=500,
                                      weight_decay=0.001, clip_norm=0.1, b2=0.999)),
        eval=EvalConfig(batch_size=16),
        mesh=MeshConfig(fsdp=4),
    )
