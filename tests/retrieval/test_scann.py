"""The ScaNN index: recall, exact scores, and what ScaNN itself would crash on or hide."""

import dataclasses
import importlib.metadata
import json
import logging
import shutil
import subprocess
import sys

import numpy as np
import pytest

from rag_jax.retrieval import build as building
from rag_jax.retrieval import scann
from rag_jax.retrieval.exact import ExactIndex, RecallSample, inner_products
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.manifest import IndexFolder
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.retrieval.scann import ScannIndex, ScannSettings, build_scann


def clustered(size, width=64):
    draw = np.random.default_rng(0)
    centres = 2 * draw.standard_normal((100, width), np.float32)
    return centres[draw.integers(0, 100, size)] + draw.standard_normal((size, width), np.float32)


def build(directory, embeddings, settings=None):
    directory.mkdir(exist_ok=True)
    embeddings.tofile(directory / "x.f32")
    build_scann(embeddings, directory / "x.f32", settings or ScannSettings(), directory / "scann")
    return directory / "scann"


@pytest.fixture(scope="module")
def embeddings():
    return clustered(5000)


@pytest.fixture(scope="module")
def built(tmp_path_factory, embeddings):
    return build(tmp_path_factory.mktemp("built"), embeddings)


@pytest.fixture(scope="module")
def index(built, embeddings):
    return ScannIndex(built, embeddings, ScannSettings(), trusted=True)


def test_recall_on_clusters_and_exact_scores_in_order(index, built, embeddings):
    assert RecallSample(embeddings, None, 10, 0).measure(index)["recall"] >= 0.97
    few = ScannIndex(built, embeddings, ScannSettings(leaves_to_search=20), trusted=True)
    assert RecallSample(embeddings, None, 10, 0).measure(few)["recall"] >= 0.9
    queries = embeddings[:70] + 0.5
    found = index.search(queries, 10)
    np.testing.assert_array_equal(
        found.scores, inner_products(queries[:, None], embeddings[found.ids])
    )
    order = np.lexsort((found.ids, -found.scores), axis=1)
    np.testing.assert_array_equal(order, np.tile(np.arange(10), (70, 1)))
    assert found.ids.dtype == np.int32 and found.scores.dtype == np.float32


def tuned(index, sample, target, settings=ScannSettings()):  # noqa: B008
    """The settings that tuning an index of these finds; the index then searches with them."""
    manifest = {"kind": "scann", "size": index.size, "width": index.width,
                "scann": dataclasses.asdict(settings)}
    whole = PassageIndex(IndexFolder(None, manifest, None, None), None, [(0, index)])
    building._tune(whole, sample, target)
    assert index.settings == ScannSettings(**whole.manifest["scann"])
    return index.settings


@pytest.mark.parametrize("target", [0.95, 0.99])
def test_tuning_reads_as_little_as_reaches_the_recall(built, embeddings, monkeypatch, target):
    """Without it, three times the leaves were read that the recall took."""
    monkeypatch.setattr(building, "FEWEST", 1)
    index = ScannIndex(built, embeddings, ScannSettings(), trusted=True)
    sample = RecallSample(embeddings, None, 10, 0)
    found = tuned(index, sample, target)
    assert sample.measure(index)["recall"] >= target
    assert found == tuned(index, sample, target), "the same sample, another result"
    assert 1 < found.leaves_to_search < ScannSettings().leaves(5000)[1]
    for depth in (50, 100):  # the most leaves with either that are cheaper
        cheaper = [way for leaves in range(1, 93) if (way := dataclasses.replace(
            found, leaves_to_search=leaves, pre_reorder_num_neighbors=depth)
            ).work(5000) < found.work(5000)]
        for index.settings in cheaper[-1:]:
            assert sample.measure(index)["recall"] < target


def test_tuning_reads_a_thousand_passages_at_least(built, embeddings):
    """One leaf may do for the sample's 10, and leave a query that asks for 50 to exact search."""
    index = ScannIndex(built, embeddings, ScannSettings(), trusted=True)
    found = tuned(index, RecallSample(embeddings, None, 10, 0), 0.01)
    assert found.leaves_to_search == 19 and found.leaves(5000)[0] == 92  # 1,033 passages


def test_a_recall_that_scann_cannot_reach_takes_all_leaves_and_is_said(built, embeddings, caplog):
    class Missed(RecallSample):
        def measure(self, index):
            return {**super().measure(index), "recall": 0.5}

    index = ScannIndex(built, embeddings, ScannSettings(), trusted=True)
    with caplog.at_level(logging.WARNING):
        found = tuned(index, Missed(embeddings, None, 10, 0), 0.99)
    assert found == dataclasses.replace(ScannSettings(), leaves_to_search=92)
    assert "does not reach the recall 0.99 asked for with all of its 92 leaves" in caplog.text


def test_vectors_in_a_narrow_cone_are_told_apart(tmp_path):
    """Those of many encoders have a cosine of 0.7 to 0.9 with each other: rounded to bfloat16, what
    ScaNN took for the ten best were nine of them, whatever was searched and scored again."""
    draw = np.random.default_rng(0)
    rows = 2.4 * draw.standard_normal(64) + draw.standard_normal((2100, 64))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    embeddings, queries = rows[:2000], rows[2000:]
    assert np.mean(embeddings[:500] @ embeddings[500:1000].T) > 0.8
    all_of_them = ScannSettings(num_leaves=10, leaves_to_search=10, pre_reorder_num_neighbors=2000)
    index = ScannIndex(build(tmp_path, embeddings, all_of_them), embeddings, all_of_them,
                       trusted=True)
    for k in (1, 10):
        assert RecallSample(embeddings, queries, k, 0).measure(index)["recall"] >= 0.999
    few = ScannSettings(num_leaves=20, leaves_to_search=4, pre_reorder_num_neighbors=40)
    index = ScannIndex(build(tmp_path / "few", embeddings, few), embeddings, few, trusted=True)
    alone = np.concatenate([index.search(query[None], 10).ids for query in queries])
    np.testing.assert_array_equal(index.search(queries, 10).ids, alone)  # whoever asks beside it


def test_each_query_of_a_batch_has_its_own_further_candidates(index, embeddings, monkeypatch):
    queries = embeddings[:2] + 0.5
    whole, search = index.search(queries, 3), index._searcher.search_batched_parallel

    def turned(*args, **kwargs):
        ids, distances = (array.copy() for array in search(*args, **kwargs))
        distances[0] = -1e3 * np.arange(ids.shape[1])  # none but the first three can be the best
        ids[1], distances[1] = ids[1, ::-1], distances[1, 0]
        return ids, distances

    monkeypatch.setattr(index._searcher, "search_batched_parallel", turned)
    np.testing.assert_array_equal(index.search(queries, 3).ids[1], whole.ids[1])


def test_a_query_without_the_further_candidates_of_its_batch_is_answered(
        index, embeddings, monkeypatch):
    """What ScaNN pads with came into the answer, or the question was searched exactly."""
    queries = embeddings[1::-1] + 0.5  # of the second one row 0 is the best
    whole, search = index.search(queries, 3), index._searcher.search_batched_parallel

    def few(*args, **kwargs):
        ids, distances = (array.copy() for array in search(*args, **kwargs))
        distances[0] = distances[0, 0]  # all of them may be the best
        ids[1, 3:], distances[1, 3:] = 0, np.nan
        return ids, distances

    monkeypatch.setattr(index._searcher, "search_batched_parallel", few)
    monkeypatch.delattr(index, "_exact")
    found = index.search(queries, 3)
    np.testing.assert_array_equal(found.ids, whole.ids)
    np.testing.assert_array_equal(found.scores, whole.scores)


def test_two_builds_are_the_same_bit_by_bit(built, embeddings, tmp_path):
    again = build(tmp_path, embeddings)
    names = sorted(file.name for file in built.iterdir())
    assert names == sorted(file.name for file in again.iterdir()) and len(names) > 3
    assert not any("pkl" in name for name in names)
    for name in names:
        assert (built / name).read_bytes() == (again / name).read_bytes(), name


@pytest.mark.parametrize("k", [400, 5000])
def test_fewer_than_k_found_is_answered_by_exact_search(built, embeddings, k):
    narrow = ScannIndex(built, embeddings, ScannSettings(leaves_to_search=1), trusted=True)
    queries = embeddings[:6] + 0.5
    found, exact = narrow.search(queries, k), ExactIndex(embeddings).search(queries, k)
    np.testing.assert_array_equal(found.ids, exact.ids)
    np.testing.assert_array_equal(found.scores, exact.scores)


def test_only_the_rows_that_fell_short_are_replaced(index, embeddings, monkeypatch):
    queries = embeddings[:4] + 0.5
    whole, exact = index.search(queries, 3), ExactIndex(embeddings).search(queries, 3)
    search = index._searcher.search_batched_parallel

    def damaged(*args, **kwargs):
        ids, distances = (array.copy() for array in search(*args, **kwargs))
        ids[1, 2], distances[1, 2] = 0, np.nan  # what ScaNN pads with
        ids[2, 1] = ids[2, 0]
        ids[3, 0] = 2**32 - 1
        return ids, distances

    monkeypatch.setattr(index._searcher, "search_batched_parallel", damaged)
    found = index.search(queries, 3)
    np.testing.assert_array_equal(found.ids[0], whole.ids[0])
    np.testing.assert_array_equal(found.ids[1:], exact.ids[1:])
    np.testing.assert_array_equal(found.scores[1:], exact.scores[1:])


def test_batch_sizes_of_one_and_of_odd_numbers_are_served(index, embeddings):
    for batch in (1, 2, 3, 33):
        assert index.search(embeddings[:batch], 4).ids.shape == (batch, 4)
    assert index.search(embeddings[:0], 4).ids.shape == (0, 4)


def test_bad_queries_never_reach_scann(index, embeddings, monkeypatch):
    monkeypatch.setattr(index, "_searcher", None)
    bad = embeddings[:2].copy()
    bad[1, 3] = np.nan
    for queries, k in ((bad, 5), (embeddings[:2, :5], 5), (embeddings[:2], 0),
                       (embeddings[:2], 5001), (embeddings[:2] * np.float32(1e30), 5)):
        with pytest.raises(RetrievalError):
            index.search(queries, k)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_embeddings_that_would_end_the_process_are_refused(tmp_path, value):
    embeddings = clustered(100)
    embeddings[77, 3] = value
    with pytest.raises(RetrievalError, match="row 77 .* coordinate 3"):
        build(tmp_path, embeddings)


def test_a_native_abort_in_the_build_is_an_error(tmp_path):
    embeddings = clustered(100)
    (tmp_path / "x.f32").write_bytes(np.full((100, 64), np.nan, "<f4").tobytes())
    with pytest.raises(RetrievalError, match="building the ScaNN index failed: .* status"):
        build_scann(embeddings, tmp_path / "x.f32", ScannSettings(), tmp_path / "scann")


@pytest.mark.parametrize("size, width, parts", [(16, 64, 1), (17, 1, 99), (40, 3, None)])
def test_small_and_narrow_sets_work(tmp_path, size, width, parts):
    embeddings = clustered(size, width)
    settings = ScannSettings(num_leaves=parts)
    index = ScannIndex(build(tmp_path, embeddings, settings), embeddings, settings)
    assert RecallSample(embeddings, None, 5, 0).measure(index)["recall"] > 0.8


def test_identical_and_zero_vectors_work(tmp_path):
    for name, value in (("ones", 1), ("zeros", 0)):
        embeddings = np.full((200, 8), value, np.float32)
        index = ScannIndex(build(tmp_path / name, embeddings), embeddings, ScannSettings())
        found = index.search(embeddings[:3], 20)
        assert all(len(set(row)) == 20 for row in found.ids.tolist())


def test_too_few_passages_and_used_directories_are_refused(tmp_path):
    with pytest.raises(RetrievalError, match="16 passages or more"):
        build(tmp_path, clustered(15))
    build(tmp_path, clustered(20))
    with pytest.raises(RetrievalError, match="not empty"):
        build(tmp_path, clustered(20))


def test_a_copied_index_reads_its_own_files(built, embeddings, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    before = ScannIndex(copy, embeddings, ScannSettings()).search(embeddings[:9], 5)
    moved = tmp_path / "other" / "name"
    moved.parent.mkdir()
    copy.rename(moved)
    after = ScannIndex(moved, embeddings, ScannSettings()).search(embeddings[:9], 5)
    np.testing.assert_array_equal(before.ids, after.ids)
    with pytest.raises(RetrievalError):
        ScannIndex(copy, embeddings, ScannSettings())


def test_damaged_files_are_an_error_without_a_manifest_too(built, embeddings, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    for file in sorted(copy.iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(RetrievalError):
            ScannIndex(copy, embeddings[:5], ScannSettings())
        file.write_bytes(whole)
    with pytest.raises(RetrievalError, match="holds 5000 passages, expected 4000"):
        ScannIndex(copy, embeddings[:4000], ScannSettings())


def test_a_native_abort_in_the_first_load_is_an_error(built, embeddings, monkeypatch):
    ScannIndex(built, embeddings, ScannSettings(), trusted=False)
    monkeypatch.setattr(scann, "_CHILD", "import os; os.abort()")
    with pytest.raises(RetrievalError, match="loading the ScaNN index failed: .* status -6"):
        ScannIndex(built, embeddings, ScannSettings(), trusted=False)
    ScannIndex(built, embeddings, ScannSettings(), trusted=True)


def test_programs_of_the_working_folder_are_not_run(built, embeddings, tmp_path, monkeypatch):
    """`python -m` puts it on sys.path: where an index was opened, a sitecustomize.py of it ran."""
    for name in ("sitecustomize", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w'); 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    ScannIndex(built, embeddings, ScannSettings(), trusted=False)
    assert not (tmp_path / "run").exists()


def test_the_child_ends_with_its_parent():
    """After a SIGKILL of the command it went on building, with all cores."""
    begun = scann._CHILD.partition("sys.path[:]")[0]
    late = subprocess.run([sys.executable, "-c", begun], text=True, stderr=subprocess.PIPE,
                          input=json.dumps({"parent": 1}))
    assert late.returncode == 1 and "its parent has ended" in late.stderr
    child = f"{begun}\nprint('begun', flush=True)\nimport time\ntime.sleep(30)\nprint('left')\n"
    parent = subprocess.Popen([sys.executable, "-c", (
        "import json, os, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], text=True,\n"
        "               input=json.dumps({'parent': os.getpid()}))\n")],
        stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout.readline() == "begun\n"
        parent.kill()
        assert parent.stdout.read() == "", "the pipe is closed when both have ended"


def test_without_a_wheel_the_reason_and_the_exact_index_are_named(monkeypatch, built, embeddings):
    assert scann.scann_missing() is None
    assert importlib.metadata.version("scann") in scann.scann_version()
    monkeypatch.setitem(sys.modules, "scann", None)
    assert "Linux only" in scann.scann_missing() and "exact" in scann.scann_missing()
    with pytest.raises(RetrievalError, match='kind="exact"'):
        ScannIndex(built, embeddings, ScannSettings())


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_leaves", 0), ("num_leaves", 1.5), ("leaves_to_search", -1), ("avq", 0),
        ("soar_lambda", float("nan")), ("dimensions_per_block", 0), ("dimensions_per_block", None),
        ("pre_reorder_num_neighbors", 0), ("random_init", "no"), ("brute_force_below", -1),
        ("avq", "2.5"), ("num_leaves", np.float64(4)),
    ],
)  # fmt: skip
def test_settings_that_scann_would_crash_on_are_refused(field, value):
    with pytest.raises(RetrievalError, match=field):
        ScannSettings(**{field: value})


def test_numbers_of_numpy_are_written_as_those_of_python():
    settings = ScannSettings(num_leaves=np.int64(4), avq=np.float32(2), random_init=np.bool_(True))
    assert settings == ScannSettings(num_leaves=4, avq=2.0, random_init=True)
    assert ScannSettings(**json.loads(json.dumps(dataclasses.asdict(settings)))) == settings


def test_leaves_follow_the_size_and_never_exceed_it():
    assert ScannSettings().leaves(100_000) == (411, 65)
    assert ScannSettings().leaves(1_000_000) == (1300, 116)
    assert ScannSettings(num_leaves=50, leaves_to_search=90).leaves(20) == (20, 20)
    assert ScannSettings().leaves(1) == (1, 1)
    assert ScannSettings().leaves(8000) == (116, 116)  # few enough to look at all
    assert ScannSettings().leaves(20_000) == (184, 76)
