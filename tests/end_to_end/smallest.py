"""A configuration of everything at the smallest size: for resuming, not for learning."""

from rag_jax.config import (
    BartConfig,
    BertConfig,
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
    small = {"vocab_size": 0, "width": 16, "heads": 2, "mlp_width": 32, "dropout": 0.1}
    fast = OptimizerConfig(learning_rate=1e-3, warmup_steps=2, update_ratios=False)
    warmup = {"steps": 6, "batch_size": 8, "log_every": 1, "save_every": 3, "optimizer": fast}
    return Config(
        tensorboard=False,
        data=DataConfig(fictional_countries=8, generator_vocab=400, retriever_vocab=400,
                        max_question_length=16, max_passage_length=32, max_source_length=64,
                        max_target_length=8, length_buckets=64),
        model=ModelConfig(
            retriever=BertConfig(max_positions=64, layers=1, **small),
            generator=BartConfig(max_positions=64, encoder_layers=1, decoder_layers=1, **small)),
        retrieval=RetrievalConfig(k=2),
        retriever_warmup=RetrieverWarmupConfig(**warmup),
        generator_warmup=GeneratorWarmupConfig(**warmup),
        train=TrainConfig(steps=10, batch_size=8, log_every=1, eval_every=4, save_every=3,
                          optimizer=fast),
        eval=EvalConfig(batch_size=32, max_examples=8, metrics=("qa", "kilt")),
    )
