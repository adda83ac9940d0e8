"""RAG batches: whose parameters retrieved them, and that an interruption does not change them."""

import types

import jax
import numpy as np
import pytest

from rag_jax import parallel
from rag_jax.config import ConfigError, MeshConfig
from rag_jax.data import order
from rag_jax.training.sources import RagSource, finder

QUESTIONS, BATCH, SEED = 20, 8, 5


class Questions:
    ids = np.arange(QUESTIONS * 3, dtype=np.int32).reshape(QUESTIONS, 3)
    mask = ids % 2 == 0
    texts = np.array([f"question {row}" for row in range(QUESTIONS)], object)

    def __len__(self):
        return QUESTIONS


class Batcher:
    """Hands back what it was given, as arrays; with passages there must be an index."""

    questions = Questions()

    def batch(self, rows, retrieved, index, rng, own):
        assert (retrieved is None) == (index is None) and len(own) == len(rows)
        draw = np.full(len(rows), rng.integers(1 << 30))
        if retrieved is None:
            retrieved = np.full((len(rows), 1), -7)
        assert np.asarray(retrieved).dtype.kind == "i"
        return {"rows": rows, "retrieved": np.asarray(retrieved), "draw": draw}


class Finder:
    """Finds the passages "parameter" and "first token of the question"; counts its searches."""

    def __init__(self):
        self.searches = 0

    def __call__(self, params, rows):
        value, ids = params["query_encoder"], Questions.ids[rows]

        def search():
            self.searches += 1
            return np.stack([np.full(len(ids), value), ids[:, 0]], axis=1).astype(np.int32)

        return search


def index_of(passages, version):
    return types.SimpleNamespace(path="the index", passages=range(passages),
                                 manifest={"files": {"embeddings.f32": {"sha256": version}}})


INDEX = index_of(100, "1")


def source(staleness, index=INDEX, batch_size=BATCH):
    find, mesh = Finder(), parallel.make_mesh(MeshConfig())
    return RagSource(Batcher(), index, find, batch_size, SEED, staleness, mesh), find


def params(value):
    return {"query_encoder": value, "generator": -1}


def host(batch):
    return {name: np.asarray(value) for name, value in batch.items()}


def drive(made, steps, start=0, begun=()):
    """The loop's order of calls; the parameter of step t is t."""
    batches = []
    if not begun:
        for step in range(start, start + made.lookahead):
            made.begin(step, params(start))
    for step in range(start, steps):
        made.begin(step + made.lookahead, params(step))
        batches.append(host(made.finish(step)))
    return batches


def equal(one, other):
    return all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_passages_are_retrieved_with_the_parameters_of_the_step_minus_staleness(staleness):
    made, _ = source(staleness)
    assert made.lookahead == staleness
    for step, batch in enumerate(drive(made, 6)):
        assert (batch["retrieved"][:, 0] == max(step - staleness, 0)).all()


@pytest.mark.parametrize("staleness", [0, 1])
def test_questions_and_passages_belong_together_and_follow_the_batch_order(staleness):
    made, _ = source(staleness)
    for step, batch in enumerate(drive(made, 6)):
        rows = order.batch_indices(QUESTIONS, BATCH, SEED, step)
        assert (batch["rows"] == rows).all()
        assert (batch["retrieved"][:, 1] == Questions.ids[rows, 0]).all()


def test_answers_are_drawn_by_seed_and_step():
    draws = [b["draw"][0] for b in drive(source(0)[0], 5)]
    assert len(set(draws)) == 5
    assert draws == [b["draw"][0] for b in drive(source(1)[0], 5)]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_pending_and_restore_give_the_same_batches(staleness):
    """Through JSON, as a checkpoint keeps it, into a source of another process."""
    import json

    straight = drive(source(staleness)[0], 7)
    first, _ = source(staleness)
    head = drive(first, 3)
    pending = json.loads(json.dumps(first.pending()))
    assert sorted(map(int, pending.keys() - {"index"})) == list(range(3, 3 + staleness))
    second, _ = source(staleness)
    second.restore(pending)
    tail = drive(second, 7, start=3, begun=pending)
    assert all(map(equal, straight, head + tail))


@pytest.mark.parametrize("passages, version, told, kept", [
    (100, "1", True, True), (100, "2", True, False), (3, "2", True, False),
    (100, "2", False, True), (3, "2", False, False)])
def test_rows_of_another_version_of_the_index_are_retrieved_again(
        capsys, passages, version, told, kept):
    """After a compaction the run could not go on, or read other passages. Checkpoints of before
    do not tell the version."""
    first, _ = source(2)
    drive(first, 3)
    pending = first.pending()
    if not told:
        del pending["index"]
    second, _ = source(2, index_of(passages, version))
    second.restore(pending)
    assert second.pending().keys() - {"index"} == ({"3", "4"} if kept else set())
    again = "the index: has changed since the checkpoint was saved, so the passages of steps 3, 4"
    assert (again in capsys.readouterr().out) != kept


def test_looking_at_what_is_pending_changes_nothing_and_searches_once():
    made, find = source(1)
    straight = drive(source(1)[0], 4)
    made.begin(0, params(0))
    made.begin(1, params(0))
    first = host(made.finish(0))
    assert made.pending() == made.pending() and list(made.pending()) == ["1", "index"]
    assert find.searches == 2
    assert equal(first, straight[0]) and equal(host(made.finish(1)), straight[1])
    assert find.searches == 2 and made.pending() == {}


def test_a_closed_book_source_retrieves_nothing_and_never_looks_ahead():
    made, _ = source(1, index=None)
    assert made.lookahead == 0
    batches = drive(made, 3)
    assert all((b["retrieved"] == -7).all() for b in batches)
    assert made.pending() == {}


def test_batches_are_split_over_the_devices():
    made, _ = source(0)
    made.begin(0, params(0))
    batch = made.finish(0)
    assert len(jax.devices()) == 8
    assert {s.data.shape for s in batch["rows"].addressable_shards} == {(1,)}


def test_a_batch_that_the_devices_cannot_share_is_refused():
    made, _ = source(0, batch_size=6)
    made.begin(0, params(0))
    with pytest.raises(ConfigError, match="a batch of 6 rows cannot be split over 8 devices"):
        made.finish(0)


def test_a_query_encoder_is_asked_by_tokens_on_the_devices_and_bm25_by_words():
    def embed(params, ids, mask):
        assert isinstance(ids, jax.Array) and len(ids.sharding.device_set) == 8
        return np.stack([np.full(ids.shape, params), ids, mask])

    rows = np.array([3, 0, 7, 7, 1, 2, 5, 4])
    def ask(lexical):
        model = types.SimpleNamespace(lexical=lexical, asks_with_texts=False)
        find = finder(model, embed, lambda queries: queries, Questions(),
                      parallel.make_mesh(MeshConfig()), 8)
        return find(params(9), rows)()

    asked = ask(lexical=False)
    assert (asked[0] == 9).all()
    assert (asked[1] == Questions.ids[rows]).all() and (asked[2] == Questions.mask[rows]).all()
    assert ask(lexical=True).tolist() == [f"question {row}" for row in rows]
