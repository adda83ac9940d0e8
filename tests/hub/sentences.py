"""Tiny folders of sentence-transformers and what it computes: the oracle (needs [parity])."""

import dataclasses
import pathlib
from typing import Any

import numpy as np
import parity
import sentence_transformers
import tokenizers
import torch
import transformers
from sentence_transformers.sentence_transformer import modules
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from rag_jax.data.text import Tokenizer
from rag_jax.data.tokenizer_training import train_bert_tokenizer
from rag_jax.hub.save import save_tokenizer

WORDS = [*parity.QUERIES, *parity.PASSAGES, "query: passage: "] * 4
SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 40}


@dataclasses.dataclass(frozen=True)
class Case:
    """A class of transformers, the modules around it, and the dtype of its file."""

    model: str
    pooling: str
    normalize: bool = True
    dense: dict[str, Any] | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard: str = "5GB"
    size: dict[str, int] = dataclasses.field(default_factory=dict)


CASES = {
    "bert_mean": Case("BertModel", "mean", settings={
        "prompts": {"query": "query: ", "document": "passage: "}}),
    "bert_cls_dense": Case("BertModel", "cls", False, {"out_features": 6}, {
        "similarity_fn_name": "dot"}, torch.float16),
    "roberta_mean_dense": Case("RobertaModel", "mean", True, {
        "out_features": 6, "bias": False, "activation_function": torch.nn.Identity()}),
    "modernbert_cls": Case("ModernBertModel", "cls", size={
        "num_hidden_layers": 3, "global_attn_every_n_layers": 2, "local_attention": 8,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id",
                         "sep_token_id"), 0)}),
    "xlm_roberta_cls": Case("XLMRobertaModel", "cls", dtype=torch.bfloat16, shard="8KB"),
}


def roberta_tokenizer() -> Any:
    """As RoBERTa's: byte-level BPE, no space before a text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(WORDS, trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), False, False)
    return backend


def xlm_roberta_tokenizer() -> Any:
    """As XLM-R's: unigrams after a normaliser and Metaspace."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(WORDS, trainers.UnigramTrainer(
        vocab_size=90, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        unk_token="<unk>", show_progress=False))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)])
    return backend


def build(case: Case, folder: pathlib.Path, seed: int = 0, scale: float = 0.3, **size: Any
          ) -> sentence_transformers.SentenceTransformer:
    """Writes the folder as sentence-transformers does, and gives its model in float32."""
    if case.model in ("BertModel", "ModernBertModel"):
        tokenizer = train_bert_tokenizer(WORDS, 120)
    else:
        tokenizer = Tokenizer({"RobertaModel": roberta_tokenizer,
                               "XLMRobertaModel": xlm_roberta_tokenizer}[case.model]())
    config = getattr(transformers, case.model.replace("Model", "Config"))(
        vocab_size=tokenizer.vocab_size, **{**SIZE, **case.size, **size})
    model = getattr(transformers, case.model)(config)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.from_numpy(scale * rng.normal(size=value.shape)).float()
            value.copy_(noise + ("norm" in name.lower() and name.endswith("weight")))
    bare = folder.parent / f"{folder.name}_bare"
    model.to(case.dtype).save_pretrained(bare)
    save_tokenizer(bare, tokenizer, 24)
    parts = [modules.Transformer(str(bare), max_seq_length=24),
             modules.Pooling(config.hidden_size, case.pooling)]
    if case.dense:
        parts.append(modules.Dense(config.hidden_size, **case.dense))
    parts += [modules.Normalize()] * case.normalize
    sentence_transformers.SentenceTransformer(modules=parts, **case.settings).save(str(folder))
    if case.shard != "5GB":
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size=case.shard)
    return opened(folder)


def opened(folder: pathlib.Path) -> sentence_transformers.SentenceTransformer:
    """A folder's model, in float32 whatever its file has."""
    return sentence_transformers.SentenceTransformer(
        str(folder), device="cpu", model_kwargs={"dtype": torch.float32}).float()


def vectors(model: sentence_transformers.SentenceTransformer) -> dict[str, np.ndarray]:
    """Those of the texts in parity.py, and all states of the questions' tokens."""
    states = model.encode(parity.QUERIES, prompt_name="query", output_value="token_embeddings")
    return {"queries": model.encode_query(parity.QUERIES),
            "passages": model.encode_document(parity.PASSAGES),
            "states": np.concatenate([each.numpy() for each in states])}
