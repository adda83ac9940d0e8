"""Tiny models, random parameters and random batches for the numerical tests."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rag_jax.config import BartConfig, BertConfig, GeneratorConfig, OptimizerConfig, T5Config
from rag_jax.data.packed import Groups
from rag_jax.data.packed import places as packed_places
from rag_jax.models import rag
from rag_jax.training import optim
from rag_jax.types import Batch

PAD, END = 1, 2
# These programs run for a millisecond and compile for seconds: compile them with less effort.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
BERT = BertConfig(
    vocab_size=30, max_positions=12, width=16, layers=1, heads=2, mlp_width=32, dropout=0.0,
    attention_dropout=0.0, init_std=0.3)
BART = BartConfig(
    vocab_size=38, max_positions=12, width=16, encoder_layers=1, decoder_layers=1, heads=2,
    mlp_width=32, dropout=0.0, init_std=0.3, logit_chunk=3)

T5 = T5Config(
    vocab_size=38, width=16, encoder_layers=1, decoder_layers=2, heads=2, head_size=6, mlp_width=24,
    dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, init_std=0.3, logit_chunk=3,
    relative_buckets=8, relative_distance=9)


def t5_tokenizer(texts=()):
    """A `tokenizers.Tokenizer` of T5's form: the words of the texts, letters, two sentinels."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    words = sorted({f"\u2581{word}" for text in texts for word in text.split()})
    letters = [chr(i) for i in range(33, 127)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -9.0),
              *((word, -4.0) for word in words), *((letter, -9.0) for letter in letters)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 2, byte_fallback=False))
    backend.add_special_tokens(["<pad>", "</s>", "<unk>", "<extra_id_1>", "<extra_id_0>"])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    return backend


def llama_tokenizer(spaces, merges=("\u2581L", "im"), unigram=False):
    """A `tokenizers.Tokenizer` of Llama 2's form, of letters and merges of two.

    spaces: how one comes before a text: "prepended" to it, or by a scheme of Metaspace; "bytes" as
      in Llama 3's.
    """
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers

    letters = [chr(i) for i in range(33, 127)]
    names = ["<unk>", "\u2581", "\u0120", *letters, "\n", *merges]
    backend = tokenizers.Tokenizer(
        models.Unigram([(name, -1.0) for name in names], unk_id=0) if unigram else
        models.BPE({name: i for i, name in enumerate(names)}, [tuple(pair) for pair in merges],
                   unk_token="<unk>"))
    if spaces == "prepended":
        backend.normalizer = normalizers.Sequence([
            normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        backend.pre_tokenizer = (
            pre_tokenizers.ByteLevel(add_prefix_space=False) if spaces == "bytes" else
            pre_tokenizers.Metaspace(prepend_scheme=spaces, split=False))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def html_tokenizer():
    """A `tokenizers.Tokenizer` of Gemma's form: <bos>, <eos>, letters, and tags of HTML."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers

    special, tags = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], ["<s>", "</s>"]
    names = [*special, *tags, "\u2581", *(chr(i) for i in range(33, 127))]
    backend = tokenizers.Tokenizer(models.BPE(
        {name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(name, special=True) for name in special])
    backend.add_tokens([AddedToken(name, special=False) for name in tags])
    return backend


def rag_model(kind="token", retriever=None, generator=None, classes=0):
    """RagModel of the tiny towers with some fields replaced, or with another generator."""
    if not isinstance(generator, GeneratorConfig):
        generator = dataclasses.replace(BART, **(generator or {}))
    return rag.RagModel(
        dataclasses.replace(BERT, **(retriever or {})), generator, kind,
        start_id=END, end_id=END, pad_id=PAD, classes=classes)


def perturbed(boxed, seed=0, scale=0.3):
    """Unboxed parameters plus noise: zero biases and unit norms would hide their misuse."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) + np.float32(scale * rng.normal(size=x.shape))),
        nn.meta.unbox(boxed))


def rag_params(model, seed=0, scale=0.3):
    return perturbed(_first(model, seed), seed, scale)


@functools.cache
def _first(model, seed):
    return jit(model.init)(jax.random.key(seed))


def ragged_mask(rng, *shape):
    """bool[..., S]: real lengths from 1 to S, at least one row full."""
    lengths = rng.integers(1, shape[-1] + 1, shape[:-1])
    lengths.reshape(-1)[0] = shape[-1]
    return np.arange(shape[-1]) < lengths[..., None]


def rag_batch(seed=0, questions=3, passages=3, source=6, target=5, length=6, model=None):
    """Random rows with ragged masks; the last passage of the last question is padding."""
    model = model or rag_model()
    rng = np.random.default_rng(seed)
    B, K = questions, passages
    doc_mask = np.ones((B, K), bool)
    doc_mask[-1, 1:] = False
    words, vocab = model.retriever.vocab_size, model.generator.vocab_size
    return Batch(
        rng.integers(0, words, (B, length)).astype(np.int32),
        ragged_mask(rng, B, length),
        rng.integers(0, vocab, (B, K, source)).astype(np.int32),
        ragged_mask(rng, B, K, source),
        rng.normal(size=(B, K, model.embedding_width)).astype(np.float32) / 4,
        doc_mask,
        rng.integers(0, vocab, (B, target)).astype(np.int32),
        ragged_mask(rng, B, target),
        np.ones(B, np.float32),
        np.where(doc_mask, np.arange(B * K, dtype=np.int32).reshape(B, K), -1),
    )


def packed(batch, length):
    """The batch with the places of its tokens, `length` of them for each question."""
    masks = np.asarray(batch.source_mask).reshape(len(batch.weight), -1)
    places = np.full((len(masks), length), masks.shape[1], np.int32)
    for row, mask in zip(places, masks, strict=True):
        row[: mask.sum()] = np.flatnonzero(mask)
    return batch._replace(source_places=places)


def packed_targets(batch, groups=Groups(), spare=0):  # noqa: B008 (immutable)
    """The batch with the places of its targets' tokens, as many as the longest group has or some
    more."""
    mask = np.asarray(batch.target_mask)
    places = packed_places(mask, groups, int(groups.rows(mask).sum(axis=1).max()) + spare)
    assert places is not None
    return batch._replace(target_places=places)


def class_batch(classes, seed=0, claim=6, **settings):
    """`rag_batch` for a classifier: targets are numbers of classes, and the decoder reads ids."""
    batch, rng = rag_batch(seed, **settings), np.random.default_rng(seed + 100)
    rows = len(batch.weight)
    return batch._replace(
        target_ids=rng.integers(0, classes, (rows, 1)).astype(np.int32),
        target_mask=np.ones((rows, 1), bool),
        decoder_ids=rng.integers(0, BART.vocab_size, (rows, claim)).astype(np.int32),
        decoder_mask=ragged_mask(rng, rows, claim))


def descent(towers, rate=0.01):
    """Gradient descent whose state is the last gradients: Adam, which computes a dozen arrays of
    each parameter, would be half of what a step compiles."""
    config = OptimizerConfig(update_ratios=False)
    return optim.make_optimizer(config, 10, dict.fromkeys(towers, 1.0))._replace(
        init=lambda params: jax.tree.map(jnp.zeros_like, params),
        update=lambda grads, kept, params, scales: (
            jax.tree.map(lambda g: -rate * g, grads), grads),
        before=lambda moved, kept, scales: jax.tree.map(
            lambda p, g: p + rate * g, moved, kept))


def counted(monkeypatch, module, name):
    """A list that grows whenever a compiled program runs what `module.name` computes."""
    calls, function = [], getattr(module, name)

    def counting(*given):
        jax.debug.callback(lambda: calls.append(1))
        return function(*given)

    monkeypatch.setattr(module, name, counting)
    return calls


def assert_trees_close(actual, expected, rtol=1e-5, atol=1e-7):
    """Every leaf, with `atol` relative to the leaf's largest entry; names the leaf that differs."""
    for (path, a), e in zip(
            jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        np.testing.assert_allclose(
            a, e, rtol=rtol, atol=atol * max(1.0, np.abs(e).max(initial=0.0)),
            err_msg=jax.tree_util.keystr(path))


def is_zero(tree):
    return all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(tree))
