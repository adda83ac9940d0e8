"""The step that retrieves for itself against the host's path: batches, losses, gradients."""

import dataclasses
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rag_jax import parallel
from rag_jax.config import Config, MeshConfig
from rag_jax.config.overrides import replace
from rag_jax.data import order, packed
from rag_jax.data.batches import PASSAGE_TABLE, RagBatcher
from rag_jax.data.packed import Groups
from rag_jax.data.question_files import Example
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.text import GeneratorFormat
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.models import rag
from rag_jax.retrieval.device import DeviceIndex
from rag_jax.retrieval.editing import edit_index
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.protocol import Passage
from rag_jax.retrieval.shards import PassageEmbedder
from rag_jax.retrieval.store_writing import write_store
from rag_jax.training import indexing, on_device, step
from tests.retrieval.indexing import build_index

K, B, LENGTH, SEED = 3, 8, 24, 5
TRAINED = ("query_encoder", "generator")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(model, questions, index of 40 passages) with lengths on both sides of the room there is."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abdelmnorst"), 3)) for _ in range(60)]
    texts = [" ".join(rng.choice(words, 1 + i % 4)) for i in range(40)]
    bart, bert = train_bart_tokenizer(texts, 350), train_bert_tokenizer(texts, 120)
    format = GeneratorFormat(bart, LENGTH)
    examples = [Example(str(i), " ".join(rng.choice(words, 1 + i % 3)),
                        tuple(rng.choice(words, 2))) for i in range(20)]
    questions = QuestionTokens(examples, bert, format, 10, 6)
    model = tiny.rag_model(
        retriever={"vocab_size": bert.vocab_size},
        generator={"vocab_size": bart.vocab_size, "max_positions": LENGTH})
    model = dataclasses.replace(model, start_id=bart.end, end_id=bart.end, pad_id=bart.pad)
    path = tmp_path_factory.mktemp("world")
    passages = [Passage(str(i), words[i] if i % 3 else "", text) for i, text in enumerate(texts)]
    store = write_store(path / "store", passages, {PASSAGE_TABLE: lambda ps: format.passages(
        [p.title for p in ps], [p.text for p in ps])})
    index = build_index(
        store, lambda ids, mask: rng.standard_normal((len(ids), 16)).astype(np.float32),
        path / "index", token_table=PASSAGE_TABLE, encoder_fingerprint="random", max_length=8,
        batch_size=8, length_buckets=(8,), kind="exact", progress=False)
    return model, questions, index


def mesh_of(devices):
    return parallel.make_mesh(MeshConfig(), jax.devices()[:devices])


def placed(world, mesh, dtype="float32"):
    config = replace(Config(), {"retrieval.where": "device", "retrieval.device_dtype": dtype})
    return on_device.open_index(config, world[1].format, mesh, world[2])


def completed(world, index, params, number=0):
    """The batch of a step, made on the devices."""
    model, questions, _ = world
    source = on_device.QuestionSource(questions, index, B, SEED)
    complete = on_device.completion(model, questions.format, K, index.mesh, index.settings)
    return jax.jit(complete.batch, in_shardings=(None, complete.shardings))(
        params, source.finish(number))


def on_host(world, retrieved, number=0, embeddings=None):
    """The batch of a step with given passages, made on the host at full length."""
    model, questions, index = world
    batcher = RagBatcher(questions, LENGTH, model.embedding_width, model.null_document != "none")
    rows = order.batch_indices(len(questions), B, SEED, number)
    return batcher.batch(rows, retrieved, index, order.generator(SEED, 4, number))


def retrieved_by(world, params, index, number=0):
    """int32[B, K]: what a search with these parameters finds."""
    model, questions, _ = world
    rows = order.batch_indices(len(questions), B, SEED, number)
    queries = rag.embed(model, params["query_encoder"], questions.ids[rows], questions.mask[rows])
    return index.search(np.asarray(queries), K).ids


def fields(batch, expected):
    """(name, one, other) of every field that the host fills."""
    both = zip(batch._fields, batch, expected, strict=True)
    return [(name, one, other) for name, one, other in both if other is not None]


@pytest.mark.parametrize("devices", [1, 8])
def test_the_batch_is_bitwise_that_of_the_host(world, devices):
    params = tiny.rag_params(world[0])
    index = placed(world, mesh_of(devices))
    for number in (0, 3):
        batch = completed(world, index, params, number)
        expected = on_host(world, retrieved_by(world, params, world[2], number), number)
        for name, one, other in fields(batch, expected):
            np.testing.assert_array_equal(one, other, err_msg=name)
            assert one.dtype == other.dtype, name
            assert one.sharding.shard_shape(one.shape)[0] == B // devices, name
    assert len(np.unique(np.asarray(batch.source_mask).sum(-1))) > 3, "lengths must differ"


def test_a_null_document_reads_the_question_alone(world):
    """Every question at its full length, whatever passage stood there before."""
    world = (dataclasses.replace(world[0], null_document="bias"), *world[1:])
    params = tiny.rag_params(world[0])
    batch = completed(world, placed(world, mesh_of(8)), params)
    expected = on_host(world, retrieved_by(world, params, world[2]))
    assert batch.source_ids.shape[1] == K + 1 and batch.doc_mask.shape[1] == K
    for name, one, other in fields(batch, expected):
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_what_a_classifiers_decoder_reads_stays_with_its_question(world):
    params, mesh = tiny.rag_params(world[0]), mesh_of(8)
    index = placed(world, mesh)
    source = on_device.QuestionSource(world[1], index, B, SEED)
    complete = on_device.completion(world[0], world[1].format, K, index.mesh, index.settings)
    ids = parallel.put_batch(np.arange(4 * B, dtype=np.int32).reshape(B, 4), mesh)
    questions, *rest = source.finish(0)
    given = (questions._replace(decoder_ids=ids, decoder_mask=ids % 4 < 3), *rest)
    batch = jax.jit(complete.batch)(params, given)
    np.testing.assert_array_equal(batch.decoder_ids, ids)
    np.testing.assert_array_equal(batch.decoder_mask, ids % 4 < 3)


def edited(folder, deleted, added=None):
    """A later version of an index in a folder, without some rows and with a store of passages."""
    rng = np.random.default_rng(1)
    embedder = PassageEmbedder(
        lambda ids, mask: rng.standard_normal((len(ids), 16)).astype(np.float32),
        token_table=PASSAGE_TABLE, encoder_fingerprint="random", max_length=8, batch_size=8,
        length_buckets=(8,), progress=False)
    edit_index(folder, embedder, added, [str(row) for row in deleted], compact=False)
    return PassageIndex.open(folder)


def test_fewer_passages_than_k_are_padded_as_on_the_host(world, tmp_path):
    params = tiny.rag_params(world[0])
    index = placed(world, mesh_of(8))
    folder = shutil.copytree(world[2].path, tmp_path / "index")
    index.update(edited(folder, np.setdiff1d(np.arange(40), [7, 31])))
    batch = completed(world, index, params)
    rows = np.asarray(retrieved_by_two(world, params))
    expected = on_host(world, rows)
    assert (np.asarray(batch.doc_mask) == [True, True, False]).all()
    for name, one, other in fields(batch, expected):
        np.testing.assert_array_equal(one, other, err_msg=name)


def retrieved_by_two(world, params):
    """Rows 7 and 31 in the order of their scores, then padding."""
    model, questions, index = world
    rows = order.batch_indices(len(questions), B, SEED, 0)
    queries = rag.embed(model, params["query_encoder"], questions.ids[rows], questions.mask[rows])
    scores = np.asarray(queries) @ index.table[[7, 31]].T
    first = np.where(scores[:, 0] >= scores[:, 1], 7, 31)
    return np.stack([first, 38 - first, np.full(B, -1)], axis=1)


def made_step(world, params, mesh, complete=None, show=None):
    """(jitted step of two micro-batches, its first state, which keeps the last gradients)."""
    model, optimizer = world[0], tiny.descent(TRAINED)
    _, _, shardings = step.init_state(model, rag.TOWERS, optimizer, 0, mesh)
    run = step.make_train_step(step.rag_loss(model), optimizer, shardings, 2, None, complete,
                               show=show)
    params = jax.device_put(jax.tree.map(jnp.copy, params), shardings.params)  # donated
    return run, step.TrainState(params, jax.jit(
        optimizer.init, out_shardings=shardings.opt_state)(
            {tower: params[tower] for tower in TRAINED}))


def one_step(world, params, batch, mesh, complete=None):
    """(gradients, parameters after, metrics) of one step."""
    run, state = made_step(world, params, mesh, complete)
    compiled = run.lower(state, batch, np.int32(0)).compile(
        compiler_options={"xla_backend_optimization_level": 0})
    after, metrics = compiled(state, batch, np.int32(0))
    return jax.device_get((after.opt_state, after.params, metrics))


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 1, 2)])
def test_loss_gradients_and_update_are_those_of_the_host_path(world, sizes):
    """Four devices that retrieve in the step, against a host search and the plain step there."""
    model, questions, index = world
    params = tiny.rag_params(model)
    mesh = parallel.make_mesh(MeshConfig(*sizes), jax.devices()[:4])
    device = placed(world, mesh)
    complete = on_device.completion(model, questions.format, K, device.mesh, device.settings)
    given = on_device.QuestionSource(questions, device, B, SEED).finish(0)
    found = one_step(world, params, given, mesh, complete)
    host = parallel.put_batch(on_host(world, retrieved_by(world, params, index)), mesh)
    expected = one_step(world, params, host, mesh)
    assert not tiny.is_zero(expected[0]["query_encoder"])
    tiny.assert_trees_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    tiny.assert_trees_close(found[2], expected[2], rtol=1e-6)
    tiny.assert_trees_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("devices", [1, 4])
def test_what_is_found_first_is_packed_and_trains_as_what_the_step_finds(
        world, devices, monkeypatch):
    """Two micro-batches on each device; a batch that does not fit is left as it is."""
    model, questions, _ = world
    # The rounding of log p(y | x, z) is that of posteriors: answers are not too unlikely.
    params, mesh = tiny.rag_params(model, scale=0.1), mesh_of(devices)
    index, groups = placed(world, mesh), Groups(devices, 2)
    complete = on_device.completion(model, questions.format, K, mesh, index.settings)
    given = on_device.QuestionSource(questions, index, B, SEED).finish(0)
    expected = one_step(world, params, given, mesh, complete)
    for fits in (True, False):
        if not fits:
            monkeypatch.setattr(packed, "room", lambda *usual: 16)
        pack = on_device.packing(RagBatcher(questions, LENGTH, model.embedding_width,
                                            groups=groups), index, B, K)
        batch = pack(jax.jit(complete.batch)(params, given))
        assert (batch.source_places is not None) == fits
        if fits:
            assert batch.source_places.shape[0] == groups.count
            assert batch.source_places.size < batch.source_mask.size
            assert (np.asarray(batch.source_places) < batch.source_mask.size / groups.count).sum(
                ) == np.asarray(batch.source_mask).sum(), "every token has its place"
        run, state = made_step(world, params, mesh, complete._replace(packed=pack))
        after, metrics = jax.device_get(run(state, given, np.int32(0)))
        assert metrics.pop("padding_share") < expected[2]["padding_share"] or not fits
        tiny.assert_trees_close(after.opt_state, expected[0], rtol=1e-5, atol=1e-6)
        tiny.assert_trees_close(after.params, expected[1], rtol=1e-5, atol=1e-5)
        tiny.assert_trees_close(
            metrics, {name: expected[2][name] for name in metrics}, rtol=1e-5, atol=1e-6)


def test_on_cpus_a_family_that_packs_finds_its_passages_first(world):
    model, questions, _ = world
    index = placed(world, mesh_of(1))
    for family, finds_first in ((model, True), (dataclasses.replace(
            model, generator=dataclasses.replace(model.generator, family="causal")), False)):
        assert family.packs == finds_first
        _, complete, _ = on_device.training(
            family, replace(Config(), {"retrieval.k": K, "train.batch_size": B}),
            types.SimpleNamespace(format=questions.format), questions, index)
        assert (complete.packed is not None) == finds_first


def test_passages_come_and_go_and_the_step_is_compiled_once(world, compilations, tmp_path):
    """Encode, search, gather, loss and update; every time it reads what is there then."""
    model, questions, index = world
    device = placed(world, mesh_of(4))
    complete = on_device.completion(model, questions.format, K, device.mesh, device.settings)
    source = on_device.QuestionSource(questions, device, B, SEED)
    run, state = made_step(world, tiny.rag_params(model), device.mesh, complete,
                           lambda batch: {"doc_ids": batch.doc_ids})
    new = [passage._replace(id=f"new {passage.id}") for passage in map(
        index.passages.__getitem__, range(40))]
    added = write_store(tmp_path / "new", new, {PASSAGE_TABLE: lambda ps: questions.format.passages(
        [p.title for p in ps], [p.text for p in ps])})
    folder = shutil.copytree(index.path, tmp_path / "index")
    changes = [lambda: None, lambda: device.update(edited(folder, range(0, 40, 2))),
               lambda: device.update(edited(folder, (), added)), lambda: device.swap(index)]
    allowed = [range(40), range(1, 40, 2), [*range(1, 40, 2), *range(40, 80)], range(40)]
    for number, (change, rows) in enumerate(zip(changes, allowed, strict=True)):
        change()
        expected = retrieved_by(world, state.params, device, number)
        compilations.clear()
        state, metrics = run(state, source.finish(number), np.int32(number))
        assert bool(compilations) == (number == 0), "the first step alone"
        found = np.asarray(metrics["doc_ids"])
        np.testing.assert_array_equal(found, expected)
        assert set(found.ravel()) <= set(rows) and np.isfinite(metrics["nll"])


def test_passages_are_found_with_the_parameters_of_the_step(world):
    """Nothing is stale: other parameters, other passages, from the same jitted program."""
    index = placed(world, mesh_of(8), "bfloat16")
    model, questions, _ = world
    complete = on_device.completion(model, questions.format, K, index.mesh, index.settings)
    run = jax.jit(complete.batch, in_shardings=(None, complete.shardings))
    given = on_device.QuestionSource(questions, index, B, SEED).finish(0)
    found = []
    for seed in (0, 1):
        params = tiny.rag_params(model, seed)
        batch = run(params, given)
        expected = on_host(world, retrieved_by(world, params, index))
        np.testing.assert_array_equal(batch.source_ids, expected.source_ids)
        np.testing.assert_allclose(batch.doc_embeddings, expected.doc_embeddings, rtol=2**-8)
        found.append(np.asarray(batch.source_ids))
    assert (found[0] != found[1]).any()


def test_where_host_leaves_the_index_alone(world):
    assert on_device.open_index(Config(), world[1].format, mesh_of(1), world[2]) is world[2]


@pytest.mark.parametrize("given", [5, None])
def test_an_index_on_the_devices_says_what_was_measured_there_alone(world, monkeypatch, given):
    """Its folder tells of exact search in float32. Without questions it is measured with passages,
    and a second reading of the same rows leaves what was measured."""
    index, config = world[2], replace(Config(), {
        "retrieval.where": "device", "retrieval.device_dtype": "int8"})
    job = types.SimpleNamespace(config=config, mesh=mesh_of(8), model=None,
                                prepared=types.SimpleNamespace(format=world[1].format))
    for name, made in (("fingerprint", "e"), ("passage_embedder", None), ("build_index", index)):
        monkeypatch.setattr(indexing, name, lambda *given, made=made, **how: made)
    built = indexing.index_store(job, {"document_encoder": None}, None, index.path,
                                 None if given is None else index.table[:given])
    opened = on_device.open_index(config, world[1].format, job.mesh, index)
    assert index.manifest["kind"] == "exact" and index.manifest["recall"]["recall"] == 1.0
    assert isinstance(opened, DeviceIndex) and opened.manifest["recall"] is None
    built.reload()
    for one in (built, opened):
        assert one.manifest["kind"] == "device (int8)"
        assert one.manifest["files"] == index.manifest["files"]
    recall = built.manifest["recall"]
    assert (recall["queries"], recall["source"] == "given") == (given or 40, given is not None)
    assert 0.5 < recall["recall"] <= 1
