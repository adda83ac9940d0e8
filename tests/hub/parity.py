"""Our side of the comparison with transformers: the same record from a checkpoint folder."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tiny
from flax.traverse_util import flatten_dict

from rag_jax.config import BertConfig
from rag_jax.data.padding import pad_rows
from rag_jax.data.text import Tokenizer, encoder_input
from rag_jax.decoding.answer import decode
from rag_jax.decoding.settings import Decoding
from rag_jax.hub import names
from rag_jax.hub.families import FAMILIES
from rag_jax.hub.load import Pretrained, load, plan
from rag_jax.models import rag, teacher_forcing, vocabulary
from rag_jax.models.bert import Bert
from rag_jax.models.cross_encoder import CrossEncoder
from rag_jax.models.dpr import DprEncoder
from rag_jax.models.generator import Generator, build
from rag_jax.models.likelihood import log_likelihood
from rag_jax.models.modern_bert import ModernBert
from rag_jax.types import Batch

QUERIES = ["Who wrote Hamlet?", "capital of Peru", "A longer question than the others, is it not?"]
PASSAGES = ["Lima is the capital of Peru.", "Hamlet is a tragedy by William Shakespeare.", "x"]


def body(config: BertConfig) -> nn.Module:
    """What `DprEncoder` pools."""
    return (ModernBert if config.model_type == "modernbert" else Bert)(config)


def sentence_vectors(found: Pretrained) -> dict[str, np.ndarray]:
    """What a folder of sentence-transformers makes of QUERIES and PASSAGES, which have no titles,
    and the states of the questions' tokens."""
    encoder, tokenizer = found.retriever, Tokenizer.load(found.tokenizers["bert"])
    asked = encoder_input(tokenizer, QUERIES, None, found.longest, encoder=encoder)
    rows = asked + encoder_input(tokenizer, [""] * len(PASSAGES), PASSAGES, found.longest,
                                 encoder=encoder)
    ids, mask = pad_rows(rows, found.longest, tokenizer.pad)

    @tiny.jit
    def run(params):
        states = body(encoder).apply({"params": params["bert"]}, ids, mask)
        return DprEncoder(encoder).apply({"params": params}, ids, mask), states

    with jax.default_matmul_precision("highest"):
        vectors, states = map(np.asarray, run(found.params["bert"]))
    count = len(QUERIES)
    return {"queries": vectors[:count], "passages": vectors[count:],
            "states": states[:count][mask[:count]]}


def rag_model(pretrained: Pretrained) -> rag.RagModel:
    ids = pretrained.ids
    return rag.RagModel(pretrained.retriever, pretrained.generator, pretrained.kind or "token",
                        ids.start, ids.end, ids.pad)


def batch(x: dict[str, np.ndarray]) -> Batch:
    ints = {k: v.astype(np.int32) for k, v in x.items() if v.dtype.kind == "i"}
    return Batch(ints["question_ids"], x["question_mask"], ints["source_ids"], x["source_mask"],
                 x["doc_embeddings"], np.ones(x["source_ids"].shape[:2], bool),
                 ints["target_ids"], x["target_mask"], np.ones(len(x["target_ids"]), np.float32))


def outputs(pretrained: Pretrained, x: dict[str, np.ndarray], params) -> dict[str, jax.Array]:
    """What `reference.record` has under "outputs/" that is differentiable."""
    if pretrained.generator is None:
        tower = params[next(iter(params))]
        encoder = [x["question_ids"], x["question_mask"], x["token_types"]]
        if "reranker" in params:
            return {"output": CrossEncoder(pretrained.retriever).apply({"params": tower}, *encoder)}
        if "bert" in FAMILIES[pretrained.family].places:
            states = body(pretrained.retriever).apply({"params": tower["bert"]}, *encoder)
            return {"output": states * x["question_mask"][:, :, None]}
        return {"output": DprEncoder(pretrained.retriever).apply({"params": tower}, *encoder)}

    config = pretrained.generator

    def generate(generator: Generator) -> dict[str, jax.Array]:
        passages = x["source_ids"].shape[1]
        ids, mask = (x[k].reshape(-1, x[k].shape[-1]) for k in ("source_ids", "source_mask"))
        targets = jnp.repeat(jnp.asarray(x["target_ids"]), passages, axis=0)
        states = generator.states(
            ids[:, None], mask[:, None], teacher_forcing.shift_right(targets, pretrained.ids.start))
        encoded = {} if config.family == "causal" else {"encoded": generator.encode(ids, mask)}
        if config.family == "t5":
            encoded["fused"] = generator.logits(generator.states(
                x["source_ids"], x["source_mask"],
                teacher_forcing.shift_right(jnp.asarray(x["target_ids"]), pretrained.ids.start)))
        logits = vocabulary.logits(
            *vocabulary.head(params["generator"]), states, config.logit_cap)
        return {**encoded, "states": states, "logits": logits}

    result = nn.apply(generate, build(config))({"params": params["generator"]})
    if pretrained.retriever is None:
        return result
    model, rows = rag_model(pretrained), batch(x)
    result["embedding"] = rag.embed(model, params["query_encoder"], rows.question_ids,
                                    rows.question_mask)
    result["doc_scores"] = jnp.einsum("BE,BKE->BK", result["embedding"], rows.doc_embeddings)
    if pretrained.kind:
        result["loss"] = -log_likelihood(model, params, rows)["log_p"]
    return result


def scalar(found: dict[str, jax.Array], x: dict[str, np.ndarray], main: str) -> jax.Array:
    """The sum of the losses, or of the main output times a fixed random array; where the target
    is padding the output counts for nothing (torch gives the pad token no gradient as input)."""
    value = found[main]
    if main == "loss":
        return value.sum()
    weights = jnp.resize(x["cotangent"], value.shape)
    if main in ("states", "logits"):
        passages = x["source_ids"].shape[1]
        weights *= jnp.repeat(jnp.asarray(x["target_mask"]), passages, axis=0)[:, :, None]
    return (value * weights).sum()


def assert_same(record: dict[str, np.ndarray], folder, tolerance: float = 1e-5,
                gradient_tolerance: float = 1e-4) -> Pretrained:
    """Outputs, losses and gradients of the checkpoint in `folder` are those of `record`."""
    pretrained = load(folder)
    x = {k.removeprefix("inputs/"): v for k, v in record.items() if k.startswith("inputs/")}
    theirs = {k.removeprefix("outputs/"): v for k, v in record.items() if k.startswith("outputs/")}
    main = next(k for k in ("loss", "logits", "states", "output") if k in theirs)

    @tiny.jit
    def run(params):
        def f(params):
            found = outputs(pretrained, x, params)
            return scalar(found, x, main), found
        return jax.grad(f, has_aux=True)(params)

    with jax.default_matmul_precision("highest"):
        gradients, ours = run(pretrained.params)
    for name in theirs.keys() & ours.keys():
        mine, expected = np.asarray(ours[name]), theirs[name]
        if name == "logits" and pretrained.kind:
            expected = expected[:, :-1]  # RAG's loss feeds the last target too
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(mine, expected, rtol=tolerance if name == "loss" else 0,
                                   atol=0 if name == "loss" else tolerance * scale, err_msg=name)
    assert main in ours
    assert_same_gradients(record, pretrained, gradients, gradient_tolerance)
    if "greedy" in theirs:
        for name, beams in (("greedy", 1), ("beam", 4)):
            np.testing.assert_array_equal(answers(pretrained, x, beams, theirs[name].shape[1]),
                                          theirs[name], err_msg=name)
    return pretrained


def assert_same_gradients(record, pretrained: Pretrained, gradients, tolerance: float) -> None:
    """Every gradient of the record, relative to the largest entry of its tensor (where that is
    not itself a rounding error: the gradient of keys' biases is 0)."""
    expected = {k.removeprefix("gradients/"): v for k, v in record.items()
                if k.startswith("gradients/")}
    tree, compared = flatten_dict(gradients), set()
    floor = 3e-7 * max(np.abs(value).max() for value in expected.values())
    for weight in plan(FAMILIES[pretrained.family].places, pretrained):
        name = weight.names[0]
        mine = names.to_theirs(np.asarray(tree[weight.path]), weight.form)
        if weight.optional:  # a buffer there
            continue
        if name not in expected:
            assert not mine.any(), f"{name} has a gradient here and none there"
            continue
        theirs, compared = expected[name], compared | {name}
        if not (np.abs(mine - theirs).max() <= tolerance * np.abs(theirs).max() + floor):
            raise AssertionError(f"gradient of {name}: {np.abs(mine - theirs).max()} apart, "
                                 f"largest entry {np.abs(theirs).max()}")
    assert compared == set(expected), set(expected) - compared


def answers(pretrained: Pretrained, x: dict[str, np.ndarray], beams: int, length: int
            ) -> np.ndarray:
    model, rows, forced = pretrained, batch(x), False
    if pretrained.retriever is None:  # a generator alone, about the first source
        one = rows._replace(source_ids=rows.source_ids[:, :1], source_mask=rows.source_mask[:, :1],
                            doc_mask=rows.doc_mask[:, :1], doc_embeddings=None)
        rows, forced = one._replace(doc_scores=np.zeros((len(one.weight), 1), np.float32)), True
        model = dataclasses.replace(pretrained, retriever=tiny.BERT)
    run = functools.partial(
        decode, dataclasses.replace(rag_model(model), lexical=forced),
        Decoding(num_beams=beams, max_length=length, forced_eos=forced))
    with jax.default_matmul_precision("highest"):
        return np.asarray(tiny.jit(run)(pretrained.params, rows).best.tokens)
