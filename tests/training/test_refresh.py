"""Training the document encoder: gradients, schedule, and a world that only it can set right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rag_jax import parallel
from rag_jax.config import Config, MeshConfig, OptimizerConfig
from rag_jax.config.overrides import replace
from rag_jax.data.batches import ENCODER_TABLE, PASSAGE_TABLE
from rag_jax.data.question_files import Example
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.text import GeneratorFormat, encoder_input
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.models import rag
from rag_jax.retrieval.protocol import Passage
from rag_jax.retrieval.store_writing import write_store
from rag_jax.training import on_device, optim, step
from rag_jax.types import Seq2SeqBatch
from tests.retrieval.indexing import build_index

KEYS, SIDES, ANSWERS = "abcd", "mn", "pqrstuvw"
FACTS = [(key, side) for key in KEYS for side in SIDES]  # passage i: FACTS[i], ANSWERS[i]
K, B, LENGTH, STEPS = 4, 8, 16, 150
TOWERS = ("query_encoder", "document_encoder")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(model, questions, index, parameters, pad id of the encoders).

    Question i asks for fact i. The generator says the answer of the passage that it reads. The
    document encoder is blind for sides and answers: the two passages of a key have one embedding,
    and whatever the query encoder does, the one with the lower id comes first.
    """
    texts = [f"{k} {s} {a}" for (k, s), a in zip(FACTS, ANSWERS, strict=True)]
    letters = " ".join(KEYS + SIDES + ANSWERS)
    bart, bert = train_bart_tokenizer([letters] * 5 + texts, 330), train_bert_tokenizer(texts, 60)
    assert all(len(t.encode([letter])[0]) == 1 for t in (bart, bert) for letter in letters.split())
    format = GeneratorFormat(bart, LENGTH)
    questions = QuestionTokens([Example(str(i), f"{k} {s}", (ANSWERS[i],))
                                for i, (k, s) in enumerate(FACTS)], bert, format, 6, 3)
    model = dataclasses.replace(
        tiny.rag_model("sequence", retriever={"vocab_size": bert.vocab_size},
                       generator={"vocab_size": bart.vocab_size, "max_positions": LENGTH}),
        start_id=bart.end, end_id=bart.end, pad_id=bart.pad)
    params = dict(tiny.rag_params(model))
    table = np.array(params["document_encoder"]["bert"]["token_embedding"])
    blind = [bert.encode([letter])[0][0] for letter in SIDES + ANSWERS]
    table[blind] = table[blind[0]]
    params["document_encoder"] = {**params["document_encoder"], "bert": {
        **params["document_encoder"]["bert"], "token_embedding": jnp.asarray(table)}}
    params["generator"] = reader(model, params["generator"], format)
    path = tmp_path_factory.mktemp("world")
    store = write_store(path / "store", [Passage(str(i), "", t) for i, t in enumerate(texts)], {
        PASSAGE_TABLE: lambda ps: format.passages([p.title for p in ps], [p.text for p in ps]),
        ENCODER_TABLE: lambda ps: encoder_input(
            bert, [p.title for p in ps], [p.text for p in ps], 8)})
    embed = jax.jit(lambda ids, mask: rag.embed(model, params["document_encoder"], ids, mask))
    index = build_index(store, embed, path / "index", token_table=ENCODER_TABLE,
                        encoder_fingerprint="blind", max_length=8, batch_size=4,
                        length_buckets=(8,), kind="exact", progress=False, pad_id=bert.pad)
    return model, questions, index, params, bert.pad


def reader(model, params, format):
    """A generator that says the third word of its input, trained on random facts and questions."""
    rng, loss = np.random.default_rng(0), step.seq2seq_loss(model)
    optimizer = optim.make_optimizer(
        OptimizerConfig(learning_rate=1e-2, warmup_steps=0, clip_norm=1.0, update_ratios=False),
        300, {"generator": 1.0})

    def draw():
        sources, targets = [], []
        for _ in range(32):
            (k, s), (j, t), a = FACTS[rng.integers(8)], FACTS[rng.integers(8)], rng.choice(
                list(ANSWERS))
            sources.append(format.join(format.passages([""], [f"{k} {s} {a}"])[0],
                                       format.questions([f"{j} {t}"])[0]))
            targets.append([*format.tokenizer.encode([f" {a}"])[0], format.tokenizer.end])
        ids, goal = np.array(sources, np.int32), np.array(targets, np.int32)
        return Seq2SeqBatch(ids, np.ones_like(ids, bool), goal, np.ones_like(goal, bool))

    @jax.jit
    def train(params, state, batch):
        (total, count), grads = jax.value_and_grad(
            lambda p: loss({"generator": p["generator"]}, batch, None)[:2], has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state, total / count

    params = {"generator": params}
    state = optimizer.init(params)
    for _ in range(300):
        params, state, nll = train(params, state, draw())
    assert nll < 0.1, "the reader must read"
    return params["generator"]


def opened(world):
    config = replace(Config(), {
        "retrieval.where": "device", "retrieval.device_dtype": "float32",
        "train.document_encoder": "refresh", "data.max_passage_length": 8})
    mesh = parallel.make_mesh(MeshConfig(), jax.devices()[:2])
    return on_device.open_index(config, world[1].format, mesh, world[2])


def train(world, towers, every, steps=STEPS):
    """(parameters, index, metrics of every step) of training these towers."""
    model, questions, _, params, pad = world
    index = opened(world)
    fresh = "document_encoder" in towers
    refresher = on_device.Refresher(model, index, pad, 4) if fresh else None
    source = on_device.QuestionSource(questions, index, B, 0, refresher, every)
    complete = on_device.completion(model, questions.format, K, index.mesh, index.settings,
                                    pad if fresh else None)
    optimizer = optim.make_optimizer(
        OptimizerConfig(learning_rate=3e-3, warmup_steps=0, schedule="constant", clip_norm=1.0,
                        update_ratios=False),
        STEPS, dict.fromkeys(towers, 1.0))
    _, _, shardings = step.init_state(model, rag.TOWERS, optimizer, 0, index.mesh)
    run = step.make_train_step(
        step.rag_loss(model), optimizer, shardings, complete=complete)
    params = jax.device_put(jax.tree.map(jnp.copy, params), shardings.params)  # donated
    state = step.TrainState(params, jax.jit(optimizer.init, out_shardings=shardings.opt_state)(
        {tower: params[tower] for tower in towers}))
    history = []
    for number in range(steps):
        source.begin(number, state.params)
        state, metrics = run(state, source.finish(number), np.int32(number))
        history.append({name: float(value) for name, value in metrics.items()})
    if fresh:
        refresher.refresh(state.params, steps)
    return state.params, index, history


def right_passage_first(world, params, index):
    """Share of questions whose own passage is found first."""
    model, questions, *_ = world
    queries = rag.embed(model, params["query_encoder"], questions.ids, questions.mask)
    return float(np.mean(index.search(np.asarray(queries), 1).ids[:, 0] == np.arange(8)))


def test_only_the_document_encoder_can_set_this_world_right(world):
    params, index, history = train(world, ("query_encoder",), 1)
    assert right_passage_first(world, params, index) <= 0.5
    query_side = history[-1]["nll"]
    params, index, history = train(world, TOWERS, 1)
    assert right_passage_first(world, params, index) == 1.0
    assert history[-1]["nll"] < query_side - 0.3


def test_staleness_is_the_age_of_the_embeddings_found(world):
    _, _, history = train(world, TOWERS, 3, steps=7)
    assert [m["staleness"] for m in history] == [0, 1, 2, 0, 1, 2, 0]
    model, questions, _, params, pad = world
    index = opened(world)
    refresher = on_device.Refresher(model, index, pad, 4)
    for number in range(1, 6):
        refresher.refresh(params, number, 3)
    assert np.asarray(index.tables.steps)[:8].tolist() == [3, 4, 4, 4, 5, 5, 5, 3]
    assert not np.asarray(index.tables.steps)[8:].any()


class Calls:
    """A refresher that only writes down when it was asked for how many passages."""

    def __init__(self):
        self.next, self.asked = 5, []

    def refresh(self, params, step, passages=0):
        self.asked.append((params, step, passages))


def test_all_passages_are_refreshed_when_a_process_begins_and_after_each_checkpoint():
    """So that what an interrupted run goes on with is what it would have had."""
    calls = Calls()
    source = on_device.QuestionSource(None, None, B, 0, calls, 2, 3, lambda step: step % 5 == 0)
    source.restore({})
    for number in range(3, 9):
        source.begin(number, f"params {number}")
    assert calls.asked == [("params 3", 3, 0), ("params 4", 4, 3), ("params 5", 5, 0),
                           ("params 6", 6, 3), ("params 8", 8, 3)]
    assert calls.next == 0, "slices begin anew, as in a run that begins there"


@pytest.mark.parametrize("batch_size", [2, 3, 16])
def test_a_refresh_makes_what_building_an_index_makes(world, batch_size):
    """Of every row, and of spare rows nothing; a batch may go beyond the last passage."""
    model, _, built, params, pad = world
    index = opened(world)
    other, read = tiny.rag_params(model, 7), jax.device_get(index.tables.tokens)
    refresher = on_device.Refresher(model, index, pad, batch_size)
    refresher.refresh(other, 1)
    assert np.abs(index.embeddings(np.arange(8)) - built.table).max() > 0.1
    refresher.refresh(params, 2)
    np.testing.assert_allclose(index.embeddings(np.arange(8)), built.table, rtol=1e-4, atol=1e-5)
    assert not np.asarray(index.tables.embeddings)[8:].any() and index.size == 8
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(index.tables.tokens), read)
    refresher.refresh(other, 3)
    index.reload()
    np.testing.assert_array_equal(index.embeddings(np.arange(8)), built.table)


def test_fresh_scores_replace_those_of_the_index_and_carry_gradients(world):
    """A stale table changes which passages are found, never the loss of those that are."""
    model, questions, _, params, pad = world
    index = opened(world)
    source = on_device.QuestionSource(questions, index, B, 0)
    complete = on_device.completion(model, questions.format, 8, index.mesh, index.settings,
                                    pad)  # 8 are all passages
    run = jax.jit(complete.batch, in_shardings=(None, complete.shardings))
    batch = run(params, source.finish(0))
    loss = step.rag_loss(model)
    value, grads = tiny.jit(jax.value_and_grad(lambda p: loss(p, batch, None)[0]))(params)
    plain = batch._replace(passage_ids=None, passage_mask=None, passage_age=None)
    expected, no_grads = tiny.jit(jax.value_and_grad(lambda p: loss(p, plain, None)[0]))(params)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert not tiny.is_zero(grads["document_encoder"])
    assert tiny.is_zero(no_grads["document_encoder"])
    stale = batch._replace(doc_embeddings=batch.doc_embeddings * 3)
    again = tiny.jit(lambda p: loss(p, stale, None)[0])(params)
    np.testing.assert_allclose(again, value, rtol=1e-6)
