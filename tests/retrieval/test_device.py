"""Search on the devices against brute force in float64, on 1, 2, 4 and 8 of them."""

import functools
import shutil
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rag_jax import parallel
from rag_jax.config import MeshConfig
from rag_jax.retrieval import device, device_search, verification
from rag_jax.retrieval.device import DeviceIndex, TokenSpec
from rag_jax.retrieval.device_search import DeviceSettings, DeviceTables
from rag_jax.retrieval.editing import edit_index
from rag_jax.retrieval.exact import RecallSample
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.shards import PassageEmbedder
from rag_jax.retrieval.store_writing import write_store
from tests.retrieval.indexing import build_index

DTYPES = ("float32", "bfloat16", "int8")
WIDTH = 24


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@functools.cache
def mesh_of(count):
    """Two axes where there can be: rows go over all of them."""
    model = 2 if count > 1 else 1
    return parallel.make_mesh(MeshConfig(-1, model), jax.devices()[:count])


def tables(embeddings, dtype, capacity=1024, valid=None):
    """DeviceTables as host arrays."""
    def full(x):
        return np.concatenate([x, np.zeros((capacity - len(x), *x.shape[1:]), x.dtype)])

    columns = [None if x is None else full(x) for x in device_search.encoded(embeddings, dtype)]
    valid = np.ones(len(embeddings), bool) if valid is None else valid
    return DeviceTables(*columns, full(valid), np.zeros(capacity, np.int32), {})


def run(memory, queries, k, count=8, **settings):
    mesh = mesh_of(count)
    memory = jax.device_put(memory, device_search.row_sharding(mesh))
    found = jax.jit(lambda memory, queries: device_search.search(
        memory, queries, k, mesh, DeviceSettings(**settings)))(memory, queries)
    return jax.device_get(found)


def brute_force(memory, queries, k):
    """Scores in float64 of the rows as they are kept, -inf where not valid, sorted stably."""
    scores = queries.astype(np.float64) @ memory.embeddings.astype(np.float64).T
    scores = np.where(memory.valid, scores, -np.inf)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, ids, axis=1)
    return np.where(np.isneginf(best), -1, ids), best


@pytest.mark.parametrize("wrong", [
    {"dtype": "float16"}, {"dtype": np.float32}, {"capacity": -1}, {"capacity": 2.5},
    {"recall_target": 0}, {"recall_target": 1.5}, {"recall_target": "0.9"}, {"score_bytes": 0}])
def test_settings_that_cannot_be_are_refused(wrong):
    """Any other type was taken for int8."""
    with pytest.raises(RetrievalError, match=f"DeviceSettings.{[*wrong][0]}=.*; allowed is"):
        DeviceSettings(**wrong)
    assert DeviceSettings(capacity=np.int64(5), recall_target=1).capacity == 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count, score_bytes", [(1, 2**30), (1, 4 * 13 * 100), (2, 4 * 13 * 500),
                                                (8, 2**30), (8, 4 * 13 * 7)])
def test_ids_and_scores_are_those_of_brute_force(dtype, count, score_bytes):
    """Whole and in blocks, also of fewer rows than k."""
    memory, queries = tables(normal(1000, WIDTH), dtype), normal(13, WIDTH, seed=1)
    found = run(memory, queries, 9, count, dtype=dtype, score_bytes=score_bytes)
    ids, scores = brute_force(memory, queries, 9)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5)
    assert found.ids.dtype == np.int32 and found.scores.dtype == np.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k, different", [(1, 1), (10, 3), (40, 3), (10, 30)])
def test_duplicated_rows_are_in_order_of_their_ids_on_any_number_of_devices(dtype, k, different):
    draw = np.random.default_rng(different)
    copies = normal(different, WIDTH)[draw.integers(0, different, 1000)]
    memory, queries = tables(copies, dtype), normal(5, WIDTH, seed=2)
    ids, _ = brute_force(memory, queries, k)
    first = run(memory, queries, k, 1, dtype=dtype)
    np.testing.assert_array_equal(first.ids, ids)
    for count, score_bytes in [(2, 2**30), (4, 2**30), (8, 2**30), (2, 4 * 5 * 90)]:
        other = run(memory, queries, k, count, dtype=dtype, score_bytes=score_bytes)
        np.testing.assert_array_equal(other.ids, ids, err_msg=f"{count} devices")
        np.testing.assert_array_equal(other.scores, first.scores)


@pytest.mark.parametrize("length", [6000, 16384, 20001])
def test_accelerators_find_the_best_scores_by_the_maxima_of_groups(monkeypatch, length):
    """With few different scores, of which many are -inf, in the order of their places. A CPU looks
    at all scores."""
    rng, count = np.random.default_rng(length), 21
    all_scores = jax.make_jaxpr(lambda x: device_search._top_k(x, count))(np.zeros((4, length)))
    assert str(all_scores).count("top_k[") == 1
    monkeypatch.setattr(device_search, "platform", lambda x: "gpu")
    assert length > 2 * count * device_search.GROUP
    for different, missing in ((3, 0.0), (400, 0.5), (2**20, 0.0), (5, 0.9995), (2, 1.0)):
        scores = rng.integers(0, different, (4, length)).astype(np.float32)
        scores[rng.random(scores.shape) < missing] = -np.inf
        found = jax.jit(lambda x: device_search._top_k(x, count))(scores)
        for one, other in zip(found, jax.lax.top_k(scores, count), strict=True):
            assert np.array_equal(one, other)
    top_k = str(jax.make_jaxpr(lambda x: device_search._top_k(x, count))(scores)).split("top_k[")
    assert len(top_k) == 3 and f"[4,{length}]" not in top_k[0].splitlines()[-1]


def test_rows_that_bfloat16_queries_would_confuse_are_told_apart():
    """Both halves of a query count: rows differ only along what bfloat16 loses of it."""
    query = np.zeros((1, WIDTH), np.float32)
    query[0, :2] = 1 + 2.0**-9, 1  # the first rounds to 1 in bfloat16
    rows = np.zeros((1000, WIDTH), np.float32)
    rows[:, 0], rows[:, 1] = 1, 2
    rows[700, :2] = 2, 1  # better by 2^-9
    assert run(tables(rows, "bfloat16"), query, 1).ids[0, 0] == 700


def test_different_rows_of_equal_score_are_in_order_of_their_ids_whatever_int8_makes_of_them():
    query, rows = np.zeros((1, WIDTH), np.float32), np.zeros((1000, WIDTH), np.float32)
    query[0, :3] = 1
    rows[5, :2] = 16, 0.0625  # 16.0625, of which int8 keeps 16
    rows[6, :3] = 8, 8, 0.0625  # 16.0625, of which int8 makes 16.063
    rows[4, 0] = 16
    for swapped in (rows, rows[[0, 1, 2, 3, 4, 6, 5, *range(7, 1000)]]):
        assert run(tables(swapped, "int8"), query, 3, dtype="int8").ids.tolist() == [[5, 6, 4]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 8])
def test_invalid_rows_are_never_found_and_missing_ones_are_minus_one(dtype, count):
    """Also in blocks without any, where a masked row must not come back by its exact score."""
    valid = np.zeros(1000, bool)
    valid[[3, 500, 999]] = True
    memory, queries = tables(normal(1000, WIDTH), dtype, valid=valid), normal(4, WIDTH, seed=1)
    for score_bytes in (2**30, 4 * 4 * 30):
        found = run(memory, queries, 5, count, dtype=dtype, score_bytes=score_bytes)
        ids, scores = brute_force(memory, queries, 5)
        np.testing.assert_array_equal(found.ids, ids)
        assert (found.ids[:, 3:] == -1).all() and np.isneginf(found.scores[:, 3:]).all()
        np.testing.assert_allclose(found.scores, scores, rtol=1e-5)


def test_k_beyond_the_capacity_is_filled_up():
    memory, queries = tables(normal(6, WIDTH), "float32", capacity=8), normal(2, WIDTH)
    found = run(memory, queries, 12, 8)
    ids, _ = brute_force(memory, queries, 12)
    np.testing.assert_array_equal(found.ids[:, :8], ids)
    assert (found.ids[:, 6:] == -1).all()


def test_the_recall_target_reaches_approx_max_k_with_the_size_of_the_whole():
    memory, queries = tables(normal(1000, WIDTH), "float32"), normal(4, WIDTH)
    settings = DeviceSettings("float32", recall_target=0.9)
    jaxpr = str(jax.make_jaxpr(lambda m, q: device_search.search(m, q, 5, mesh_of(8), settings))(
        memory, queries))
    assert "recall_target=0.9" in jaxpr and "reduction_input_size_override=1024" in jaxpr
    found = run(memory, queries, 5, 8, dtype="float32", recall_target=0.9)
    ids, _ = brute_force(memory, queries, 5)
    assert np.mean([len(set(a) & set(b)) / 5 for a, b in zip(found.ids, ids, strict=True)]) >= 0.9


def test_the_score_matrix_is_neither_gathered_nor_whole():
    """Collectives carry k candidates of each device; scores exist a block at a time."""
    memory, queries = tables(normal(1000, WIDTH), "float32"), normal(4, WIDTH)
    mesh, settings = mesh_of(8), DeviceSettings("float32", score_bytes=4 * 4 * 32)
    memory = jax.device_put(memory, device_search.row_sharding(mesh))
    text = jax.jit(lambda m, q: device_search.search(m, q, 5, mesh, settings)).lower(
        memory, queries).compile().as_text()
    gathered = [line for line in text.splitlines() if "all-gather" in line and " = " in line]
    assert gathered and all("[2,4,40]" in line for line in gathered if "all-gather(" in line)
    assert "[4,128]" not in text and "[4,32]" in text


def test_lookup_and_write_move_rows_of_every_dtype():
    mesh = mesh_of(8)
    host = {"a": normal(64, 3), "b": (np.arange(64, dtype=np.uint16) + 65000,
                                      normal(64, 2).astype(ml_dtypes.bfloat16))}
    placed = jax.device_put(host, device_search.row_sharding(mesh))
    ids = np.array([[0, 63], [7, 8]], np.int32)
    found = jax.jit(lambda t, i: device_search.lookup(t, i, mesh))(placed, ids)
    np.testing.assert_array_equal(found["a"], host["a"][ids])
    np.testing.assert_array_equal(found["b"][0], host["b"][0][ids])
    np.testing.assert_array_equal(found["b"][1], host["b"][1][ids].astype(np.float32))
    assert found["b"][0].dtype == jnp.int32 and found["a"].dtype == jnp.float32
    rows = np.array([5, -1, 63], np.int32)
    values = jax.tree.map(lambda x: x[:3], host)
    written = jax.jit(lambda t, i, v: device_search.write(t, i, v, mesh))(placed, rows, values)
    expected = host["a"].copy()
    expected[[5, 63]] = host["a"][[0, 2]]
    np.testing.assert_array_equal(written["a"], expected)
    assert written["a"].sharding.is_equivalent_to(placed["a"].sharding, 2)


def encoder(seed):
    table = normal(200, 8, seed=seed)

    def embed(ids, mask):
        return (table[ids] * mask[..., None]).sum(1)

    return embed


def make_store(path, ids, seed=0):
    """Passages with random words; the table "words" has their ids."""
    draw = np.random.default_rng(seed)
    passages = [Passage(name, f"title {i}", " ".join(map(str, draw.integers(0, 200, 1 + i % 9))))
                for i, name in enumerate(ids)]
    return write_store(path, passages, {
        "words": lambda ps: [[int(word) for word in p.text.split()] for p in ps]})


def embedder():
    return PassageEmbedder(encoder(0), token_table="words", encoder_fingerprint="encoder",
                           max_length=9, batch_size=16, length_buckets=(9,), progress=False)


def make_index(path, size, seed=0, fingerprint="encoder"):
    store = make_store(path / f"store{seed}", [f"s{seed}p{i}" for i in range(size)], seed)
    return build_index(store, encoder(0), path / f"index{seed}", token_table="words",
                       encoder_fingerprint=fingerprint, max_length=9, batch_size=16,
                       length_buckets=(9,), kind="exact", progress=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("indexes")
    return {"small": make_index(path, 50), "large": make_index(path, 90, seed=1),
            "foreign": make_index(path, 10, seed=2, fingerprint="another")}


def opened(index, count=8, **settings):
    return DeviceIndex(index, mesh_of(count), DeviceSettings(**{"dtype": "float32", **settings}),
                       {"words": TokenSpec(5, np.uint16)})


@pytest.mark.parametrize("count", [1, 8])
def test_it_answers_as_the_index_that_it_was_loaded_from(folders, count):
    index = folders["large"]
    placed = opened(index, count)
    for batch in (1, 3, 300):
        queries = normal(batch, 8, seed=batch)
        found, expected = placed.search(queries, 7), index.search(queries, 7)
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-5)
    assert placed.search(np.zeros((0, 8)), 3).ids.shape == (0, 3)
    assert (placed.size, placed.width, len(placed.passages)) == (90, 8, 90)
    rows = np.array([[4, 80], [0, 4]])
    np.testing.assert_array_equal(placed.embeddings(rows), index.embeddings(rows))
    assert placed.passages[80] == index.passages[80]
    np.testing.assert_array_equal(placed.passages.tokens("words").row(80),
                                  index.passages.tokens("words").row(80))
    ids, lengths = placed.tables.tokens["words"]
    expected, mask = index.passages.tokens("words").padded(np.arange(90), 5, 0)
    np.testing.assert_array_equal(ids[:90], expected)
    np.testing.assert_array_equal(lengths[:90], mask.sum(1))
    assert ids.dtype == np.uint16 and ids.shape == (1024 * count, 5)


@pytest.mark.parametrize("count,blocks", [(1, [20] * 4 + [10]), (4, [20] * 6 + [6])])
def test_it_is_loaded_a_few_rows_at_a_time(folders, monkeypatch, count, blocks):
    """28 rows a device, or 112; a device's last block begins earlier where it would not fit."""
    monkeypatch.setattr(device, "ROUND", (28, 65536))
    whole = opened(folders["large"], count, dtype="int8").tables
    index, read = folders["large"], []
    monkeypatch.setattr(device, "LOADED", 20)
    monkeypatch.setattr(index, "embeddings",
                        lambda rows: read.append(len(rows)) or index.table[rows])
    found = opened(index, count, dtype="int8").tables
    assert read == blocks
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.sharding == other.sharding and one.dtype == other.dtype
    np.testing.assert_array_equal(found.codes[:90], device_search.encoded(index.table, "int8")[1])
    assert not np.asarray(found.embeddings[90:]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_its_recall_can_be_measured(folders, dtype):
    index = folders["large"]
    recall = RecallSample(index.table, None, 10, 0).measure(opened(index, dtype=dtype))["recall"]
    assert recall > 0.97


def test_swap_finds_what_is_there_and_compiles_nothing(folders, compilations):
    placed = opened(folders["small"], capacity=1000, dtype="int8")
    queries = normal(6, 8, seed=3)
    placed.search(queries, 4)
    placed.swap(folders["small"])
    assert compilations, "the listener must see the first ones"
    compilations.clear()
    for name, seed in (("large", 1), ("small", 0)):
        placed.swap(folders[name])
        rows = folders[name].table.astype(ml_dtypes.bfloat16)
        memory = DeviceTables(rows, None, None, True, None, {})
        found = placed.search(queries, 4).ids
        np.testing.assert_array_equal(found, brute_force(memory, queries, 4)[0])
        assert placed.size == len(rows) and placed.passages[0].id == f"s{seed}p0"
        words = folders[name].passages.tokens("words")
        assert np.asarray(placed.tables.tokens["words"][1])[9] == min(5, len(words.row(9)))
    assert compilations == []
    np.testing.assert_array_equal(placed.embeddings(np.array([49, 0])),
                                  np.stack([rows[49], rows[0]]).astype(np.float32))


def test_an_edited_index_is_taken_over_by_its_new_rows_alone(
        folders, tmp_path, compilations, monkeypatch):
    """Later versions of a directory, with rows that are gone; of another base, all is loaded."""
    index, out = folders["small"], tmp_path / "index"
    shutil.copytree(index.path, out)
    placed, queries = opened(index), normal(6, 8, seed=3)

    def edit(numbers, delete, **how):
        added = make_store(tmp_path / f"store{numbers}", [f"a{n}" for n in numbers], 5) if (
            numbers) else None
        edit_index(out, embedder(), added, delete, **how)
        return PassageIndex.open(out)

    def check(placed, edited):
        for k in (1, 7):
            found, expected = placed.search(queries, k), edited.search(queries, k)
            np.testing.assert_array_equal(found.ids, expected.ids)
            np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-5)
        assert (placed.size, len(placed.passages)) == (edited.size, len(edited.passages))
        assert placed.passages.find("s0p3") is None

    read = []
    values = DeviceIndex._values
    monkeypatch.setattr(DeviceIndex, "_values", lambda self, index, rows: (
        read.append(rows.tolist()) or values(self, index, rows)))
    monkeypatch.setattr(device, "WRITTEN", 4)  # adding 8 takes two pieces
    placed.update(edit(range(3), ["s0p3"]))
    for k in (1, 7):
        placed.search(queries, k)
    compilations.clear()
    read.clear()
    edited = edit(range(3, 9), ["s0p9", "a1"])
    placed.update(edited)
    assert {row for rows in read for row in rows} == set(range(50, 58))
    check(placed, edited)
    check(opened(edited), edited)
    assert compilations == []
    assert [placed.passages.row_of(i) for i in ("s0p7", "a3")] == [7, 52]
    with pytest.raises(RetrievalError, match="none of its 56 passages has the id 's2p7'"):
        placed.passages.row_of("s2p7")
    words, added = placed.passages.tokens("words"), edited.passages.stores[1].tokens("words")
    np.testing.assert_array_equal(words.row(52), added.row(2))
    assert words.lengths_of(np.array([[52, 0]])).tolist() == [
        [len(words.row(52)), len(words.row(0))]]
    assert np.asarray(placed.tables.tokens["words"][1])[52] == min(5, len(words.row(52)))
    edited = edit((), ["a5"], compact=True)
    placed.update(edited)
    check(placed, edited)
    assert edited.manifest["size"] == len(placed.passages) == 55
    placed.update(edit((), [f"s0p{i}" for i in range(50) if i not in (3, 9, 48, 49)] + [
        f"a{i}" for i in (0, 2, 3, 4, 6, 7, 8)], compact=False))
    with pytest.raises(RetrievalError, match="1 to 2"):
        placed.search(normal(2, 8), 3)
    assert sorted(placed.search(normal(1, 8), 2).ids[0].tolist()) == [46, 47]


@pytest.mark.parametrize("name", ["embeddings.f32", "passages/tokens.words.ids"])
def test_a_damaged_index_is_refused_and_what_is_on_the_devices_stays(
        folders, tmp_path, monkeypatch, name):
    """Large indexes are opened before they are verified: a refused swap left no tables, and a
    refused update some rows of the refused version."""
    monkeypatch.setattr(verification, "BLOCK_BYTES", 64)
    monkeypatch.setattr(verification, "_verify_pending", lambda reference: None)  # not there yet
    monkeypatch.setattr(device, "WRITTEN", 4)
    out, queries = tmp_path / "index", normal(6, 8, seed=3)

    def edit(numbers, delete):
        edit_index(out, embedder(), make_store(
            tmp_path / f"store{numbers}", [f"a{n}" for n in numbers], 5), delete, compact=False)

    def damaged(path):
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        path.unlink()  # it is linked to from other versions
        path.write_bytes(content)
        return PassageIndex.open(out, verify=False)

    def check(placed, before):
        found, expected = placed.search(queries, 5), before.search(queries, 5)
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-5)

    shutil.copytree(folders["small"].path, out)
    edit(range(8), ["s0p3"])
    before = PassageIndex.open(out)
    placed = opened(before, 1)
    edit(range(8, 20), [f"a{n}" for n in range(8)])
    with pytest.raises(RetrievalError, match="differs from its sha256"):
        placed.update(damaged(out / "versions" / "3" / "added" / name))
    check(placed, before)
    with pytest.raises(RetrievalError, match="differs from its sha256"):
        placed.swap(damaged(out / "versions" / "3" / name))
    check(placed, before)


@pytest.mark.parametrize("name, interrupted", [("swap", "_load"), ("update", "write")])
def test_an_interrupted_change_leaves_the_passages_of_before(
        folders, tmp_path, monkeypatch, name, interrupted):
    """After a Ctrl-C within an edit, every question ended in an error of jax."""
    out, queries = tmp_path / "index", normal(6, 8, seed=3)
    shutil.copytree(folders["small"].path, out)
    before = PassageIndex.open(out)
    placed, expected = opened(before), before.search(queries, 5)
    placed.manifest = manifest = {**placed.manifest, "recall": 0.99}
    edit_index(out, embedder(), make_store(tmp_path / "store", ["a0", "a1"], 5), ["s0p3"],
               compact=False)
    whole, met = getattr(placed, interrupted), []

    def first_ends(*given):
        result = whole(*given)
        if not met:
            met.append(weakref.ref(result.embeddings) if result else given)
            raise KeyboardInterrupt
        assert name == "update" or met[0]() is None, "two tables may not fit on a device"
        return result

    monkeypatch.setattr(placed, interrupted, first_ends)
    with pytest.raises(KeyboardInterrupt):
        getattr(placed, name)(PassageIndex.open(out))
    found = placed.search(queries, 5)
    np.testing.assert_array_equal(found.ids, expected.ids)
    assert (placed.size, placed.manifest) == (50, manifest)
    getattr(placed, name)(after := PassageIndex.open(out))
    np.testing.assert_array_equal(placed.search(queries, 5).ids, after.search(queries, 5).ids)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_and_tokens_that_nothing_can_read_are_refused(folders, monkeypatch, dtype):
    """The host refuses them by name, and the devices answered: with a prior of nan, or with the
    passage of the largest number whatever was asked; and read other tokens in their place."""
    index, placed, queries = folders["large"], opened(folders["small"], 1), normal(2, 8)
    expected = placed.search(queries, 5)
    monkeypatch.setattr(device, "LOADED", 64)
    for value in (np.nan, np.inf, 1e30):
        table = index.table.copy()
        table[70, 3] = value
        with monkeypatch.context() as patch:
            patch.setattr(index, "embeddings", lambda rows, table=table: table[rows])
            for load in (lambda: opened(index, 1, dtype=dtype), lambda: placed.swap(index)):
                with pytest.raises(RetrievalError, match="the embedding of row 70 holds "):
                    load()
    placed.token_specs = {"words": TokenSpec(5, np.uint16, 3)}
    with pytest.raises(RetrievalError, match="'words' has the id .* reads it are 0..2"):
        placed.swap(index)
    np.testing.assert_array_equal(placed.search(queries, 5).ids, expected.ids)


def test_a_version_of_equal_embeddings_and_other_texts_is_loaded_with_its_texts(tmp_path):
    """The generator read the passages of before."""
    table = normal(200, 8)

    def first_word(ids, mask):
        return table[ids[:, 0]]

    def index(name, last):
        store = write_store(tmp_path / f"{name}-store", [Passage("a", "", f"7 {last}")], {
            "words": lambda ps: [[int(word) for word in p.text.split()] for p in ps]})
        return build_index(store, first_word, tmp_path / name, token_table="words",
                           encoder_fingerprint="encoder", max_length=9, batch_size=16,
                           length_buckets=(9,), kind="exact", progress=False)

    placed, later = opened(index("before", 8), 1), index("after", 9)
    placed.update(later)
    assert np.asarray(placed.tables.tokens["words"][0])[0, :2].tolist() == [7, 9]


def test_there_is_room_for_all_passages_where_capacity_is_below_them(folders, monkeypatch):
    monkeypatch.setattr(device, "ROUND", (8, 8))
    index, queries = folders["large"], normal(4, 8)
    placed = opened(index, 1, capacity=50)
    assert placed.capacity == 96
    np.testing.assert_array_equal(placed.search(queries, 90).ids, index.search(queries, 90).ids)
    tables = device.abstract_tables(90, 8, mesh_of(1), placed.settings, placed.token_specs)
    assert jax.tree.map(lambda x: x.shape, tables) == jax.tree.map(jnp.shape, placed.tables)


def test_what_does_not_fit_is_refused_with_the_remedy(folders):
    with pytest.raises(RetrievalError, match="1 to 50"):
        opened(folders["small"]).search(normal(2, 8), 51)
    with pytest.raises(RetrievalError, match=r"shape \(2, 9\)"):
        opened(folders["small"]).search(normal(2, 9), 5)
    placed = opened(folders["small"], capacity=8)
    assert placed.capacity == 8192, "rounded up to whole blocks on every device"
    assert opened(folders["small"], 1, capacity=140_000, dtype="int8").capacity == 3 * 65536
    placed.capacity = 89
    with pytest.raises(RetrievalError, match="90 passages .* 89 .*retrieval.capacity to 90"):
        placed.swap(folders["large"])
    placed = opened(folders["small"])
    with pytest.raises(RetrievalError, match="built by the encoder another"):
        placed.swap(folders["foreign"])
    with pytest.raises(RetrievalError, match="embeddings: row 50 is outside 0..49"):
        placed.embeddings(np.array([50]))
