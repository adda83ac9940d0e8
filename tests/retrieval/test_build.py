"""Building, resuming and publishing an index directory, and opening one that is not right."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rag_jax.errors import UserError
from rag_jax.retrieval import build
from rag_jax.retrieval.exact import ExactIndex
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.manifest import MANIFEST
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.scann import ScannIndex, ScannSettings
from rag_jax.retrieval.store_writing import write_store
from rag_jax.retrieval.versions import POINTER, current, point
from rag_jax.training.indexing import describe
from tests.retrieval.indexing import build_by_hosts, build_index

WIDTH = 16
TABLE = np.random.default_rng(0).standard_normal((1000, WIDTH), np.float32)
INPUTS = {
    "token_table": "bert",
    "encoder_fingerprint": "encoder-one",
    "max_length": 12,
    "batch_size": 4,
    "length_buckets": (4, 8, 512),
    "kind": "exact",
    "shard_rows": 16,
    "pad_id": 999,
}


def tokens_of(passages):
    return [[int(word) for word in passage.text.split()] for passage in passages]


def make_store(path, seed=1, size=50):
    draw = np.random.default_rng(seed)
    passages = [
        Passage(f"p{i}", f"title {i}", " ".join(map(str, draw.integers(0, 999, 1 + i % 17))))
        for i in range(size)
    ]
    return write_store(path, passages, {"bert": tokens_of, "empty": lambda ps: [[]] * len(ps)})


class Embedder:
    """The mean of a random vector per token; counts its calls and can be told to fail."""

    def __init__(self, fail_after=None, change=lambda array: array):
        self.shapes, self.fail_after, self.change = [], fail_after, change

    def __call__(self, ids, mask):
        if self.fail_after is not None and len(self.shapes) >= self.fail_after:
            raise KeyboardInterrupt
        self.shapes.append(ids.shape)
        assert ids.dtype == np.int32 and mask.dtype == bool and mask.any(axis=1).all()
        assert (ids[~mask] == 999).all() and (ids[mask] < 999).all()
        total = (TABLE[ids] * mask[..., None]).sum(1)
        return self.change((total / mask.sum(1, keepdims=True)).astype(np.float32))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "s")


@pytest.fixture
def out(store, tmp_path):
    build_index(store, Embedder(), tmp_path / "index", **INPUTS)
    return tmp_path / "index"


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != ".lock")


def content(path):
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files_of(path)}


def test_every_passage_is_embedded_cut_to_max_length_in_its_row(store, out):
    index = PassageIndex.open(out, "encoder-one")
    rows = [tokens[:12] for tokens in tokens_of(store)]
    expected = np.stack([TABLE[row].mean(0) for row in rows])
    np.testing.assert_allclose(index.embeddings(np.arange(50)), expected, atol=1e-5)
    assert (index.size, index.width, len(index.passages)) == (50, WIDTH, 50)
    assert list(index.passages) == list(store)
    found = index.search(expected[:5], 3)
    np.testing.assert_array_equal(found.ids, ExactIndex(index.embeddings(np.arange(50))).search(
        expected[:5], 3).ids)
    assert index.embeddings(found.ids).shape == (5, 3, WIDTH)
    for bad in (np.array([-1]), np.array([50]), np.array([0.0])):
        with pytest.raises(RetrievalError, match="embeddings"):
            index.embeddings(bad)


def test_hosts_share_the_shards_and_one_publishes_the_same_index(store, out, tmp_path):
    embedders = [Embedder() for _ in range(3)]
    built = build_by_hosts(store, tmp_path / "shared", embedders, **INPUTS)
    assert content(tmp_path / "shared") == content(out) and [i.size for i in built] == [50] * 3
    whole = Embedder()
    build_index(store, whole, tmp_path / "alone", **INPUTS)
    assert all(embedder.shapes for embedder in embedders)
    assert sum(len(embedder.shapes) for embedder in embedders) == len(whole.shapes)
    again = [Embedder() for _ in range(3)]
    build_by_hosts(store, tmp_path / "shared", again, **INPUTS)
    assert not any(embedder.shapes for embedder in again), "a finished index is only opened"


def test_hosts_resume_each_others_shards(store, out, tmp_path):
    """A host dies in its last batch; fewer hosts finish, and embed what is missing only."""
    whole = [Embedder(), Embedder()]
    build_by_hosts(store, tmp_path / "whole", whole, **INPUTS)
    killed = [Embedder(), Embedder(fail_after=len(whole[1].shapes) - 1)]
    failed = build_by_hosts(store, tmp_path / "shared", killed, **INPUTS)
    assert all(isinstance(error, BaseException) for error in failed)
    rest = Embedder()
    build_index(store, rest, tmp_path / "shared", **INPUTS)
    assert content(tmp_path / "shared") == content(out)
    assert 0 < len(rest.shapes) < sum(len(embedder.shapes) for embedder in killed)


def test_hosts_without_one_file_system_are_an_error(store, tmp_path):
    """Host 0 finds the shards of the others missing."""
    with pytest.raises(RetrievalError, match="shard 16.*do all hosts share this folder"):
        build_index(store, Embedder(), tmp_path / "index", **INPUTS, host=0, hosts=2)


def test_what_one_host_is_refused_ends_all(store, out, tmp_path):
    """From Python the others waited for ever; the commands crashed, or called it a defect."""
    others = build_by_hosts(store, out, [Embedder(), Embedder()],
                            **{**INPUTS, "encoder_fingerprint": "two"})
    assert all(isinstance(error, UserError) and "of other inputs" in str(error)
               for error in others)
    nan = build_by_hosts(store, tmp_path / "new", [Embedder(), Embedder(change=nan_at_one)],
                         **INPUTS)
    assert all(isinstance(error, UserError) and "holds nan" in str(error) for error in nan)


def test_the_embedder_sees_one_shape_per_bucket(store, tmp_path):
    embed = Embedder()
    build_index(store, embed, tmp_path / "index", **INPUTS)
    assert set(embed.shapes) == {(4, 4), (4, 8), (4, 12)}


def test_a_shard_is_embedded_by_length_the_longest_first(store, tmp_path):
    """Batches of neighbours are padded to their longest: twice the work, for passages as they come.
    """
    embed = Embedder()
    build_index(store, embed, tmp_path / "index", **{**INPUTS, "length_buckets": range(12)})
    lengths = [min(12, len(tokens)) for tokens in tokens_of(store)]
    for first, shapes in zip(range(0, 50, 16), np.split(np.array(embed.shapes), (4, 8, 12)),
                             strict=True):
        longest = sorted(lengths[first : first + 16], reverse=True)[::4]
        assert shapes.tolist() == [[4, length] for length in longest]


def test_a_batch_is_handed_over_before_the_last_one_is_read_and_written(store, tmp_path):
    """A device would wait while the host checks a batch, and longer while it writes a shard."""
    given, marks = Embedder(), []

    class Result:
        def __init__(self, array):
            self.array, self.number = array, len(given.shapes)

        def __array__(self, dtype=None, copy=None):
            assert len(given.shapes) == min(self.number + 1, 13)
            marks.append(len(list(tmp_path.glob("index/versions/.*/shards/*.json"))))
            return self.array

    build_index(store, lambda ids, mask: Result(given(ids, mask)), tmp_path / "index", **INPUTS)
    assert marks == [0] * 4 + [1] * 4 + [2] * 4 + [3]


def test_an_index_whose_batches_were_padded_to_other_lengths_is_the_same(store, out):
    """Those of an earlier version would be refused, or embedded again."""
    again = Embedder(fail_after=0)
    index = build_index(store, again, out, **{**INPUTS, "length_buckets": (3,), "batch_size": 2})
    assert index.manifest["inputs"]["length_buckets"] == [4, 8, 12]


def test_the_manifest_tells_what_the_index_is(out, store):
    manifest = PassageIndex.open(out).manifest
    assert manifest["kind"] == "exact" and manifest["encoder_fingerprint"] == "encoder-one"
    assert manifest["passages_fingerprint"] == store.fingerprint
    assert (manifest["size"], manifest["width"], manifest["dtype"]) == (50, WIDTH, "float32")
    assert manifest["recall"] == {
        "k": 10, "queries": 50, "recall": 1.0,
        "source": "passage embeddings with noise of half their norm",
    }  # fmt: skip
    assert set(manifest["versions"]) == {"rag_jax", "numpy", "scann"}
    assert set(manifest["files"]) == set(content(current(out))) - {"manifest.json"}
    assert set(content(out)) == {POINTER} | {f"versions/1/{n}" for n in content(current(out))}
    assert [path.name for path in out.parent.iterdir()] == ["index"]


def test_given_recall_queries_are_used(store, tmp_path):
    recall = {"recall_queries": TABLE[:7], "recall_k": 3}
    index = build_index(store, Embedder(), tmp_path / "index", **INPUTS, **recall)
    assert index.manifest["recall"] == {"k": 3, "queries": 7, "source": "given", "recall": 1.0}


@pytest.mark.parametrize("fail_after", [0, 3, 4, 6, 9, 12])
def test_a_killed_build_resumes_and_gives_the_same_files(store, out, tmp_path, fail_after):
    other = tmp_path / "resumed"
    with pytest.raises(KeyboardInterrupt):
        build_index(store, Embedder(fail_after), other, **INPUTS)
    with pytest.raises(RetrievalError, match="half built"):
        PassageIndex.open(other)
    marks = list((other / "versions").glob(".*/shards/*.json"))
    again, whole = Embedder(), Embedder()
    build_index(store, again, other, **INPUTS)
    build_index(store, whole, tmp_path / "whole", **INPUTS)
    finished = fail_after // 4  # shards; each takes 4 calls, the last one 1
    assert len(whole.shapes) == 13 and len(marks) == finished
    assert again.shapes == whole.shapes[4 * finished :]
    assert content(other) == content(out)


def test_finished_shards_are_not_embedded_again_unless_damaged(store, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build_index(store, Embedder(fail_after=9), tmp_path / "index", **INPUTS)
    embeddings, = tmp_path.glob("index/versions/.*/content/embeddings.f32")
    data = bytearray(embeddings.read_bytes())
    assert len(data) == 2 * 16 * WIDTH * 4
    data[70] ^= 1  # in the first shard
    embeddings.write_bytes(data + bytes(99_999))  # and longer than all shards together
    seen = []
    embed = Embedder()
    index = build_index(
        store, lambda ids, mask: seen.append(ids) or embed(ids, mask), tmp_path / "index", **INPUTS
    )
    first_tokens = {int(row[0]) for ids in seen for row in ids}
    second_shard = {tokens[0] for tokens in tokens_of(list(store)[16:32])}
    others = {tokens[0] for i, tokens in enumerate(tokens_of(store)) if not 16 <= i < 32}
    assert others <= first_tokens and not (second_shard - others) & first_tokens
    expected = np.stack([TABLE[row[:12]].mean(0) for row in tokens_of(store)])
    np.testing.assert_allclose(index.embeddings(np.arange(50)), expected, atol=1e-5)


@pytest.mark.parametrize(
    "change", [{"encoder_fingerprint": "two"}, {"max_length": 9}, {"shard_rows": 10}]
)
def test_a_partial_build_of_other_inputs_starts_anew(store, tmp_path, change):
    with pytest.raises(KeyboardInterrupt):
        build_index(store, Embedder(9), tmp_path / "index", **INPUTS)
    inputs = {**INPUTS, **change}
    embed, fresh = Embedder(), Embedder()
    build_index(store, embed, tmp_path / "index", **inputs)
    build_index(store, fresh, tmp_path / "fresh", **inputs)
    assert len(embed.shapes) == len(fresh.shapes)
    assert content(tmp_path / "index") == content(tmp_path / "fresh")


def test_a_kill_at_the_publishing_rename_loses_nothing(store, tmp_path, monkeypatch):
    def killed(partial, out, manifest):
        raise KeyboardInterrupt

    monkeypatch.setattr("rag_jax.retrieval.build.publish_index", killed)
    with pytest.raises(KeyboardInterrupt):
        build_index(store, Embedder(), tmp_path / "index", **INPUTS)
    monkeypatch.undo()
    build_index(store, Embedder(fail_after=0), tmp_path / "index", **INPUTS)


def test_the_same_inputs_return_the_index_that_is_there(store, out):
    before = content(out)
    build_index(store.path, Embedder(fail_after=0), out, **INPUTS)
    build_index(store, Embedder(fail_after=0), out, **{**INPUTS, "batch_size": 9})
    assert content(out) == before


def test_other_inputs_need_overwrite_and_then_swap(store, out):
    inputs = {**INPUTS, "encoder_fingerprint": "two"}
    before = content(out)
    with pytest.raises(RetrievalError, match="fingerprint differ.*--overwrite .*overwrite=True"):
        build_index(store, Embedder(), out, **inputs)
    assert content(out) == before
    reader = PassageIndex.open(out)  # goes on reading the files that it opened
    build_index(store, Embedder(change=lambda x: x * 2), out, **inputs, overwrite=True)
    assert PassageIndex.open(out, "two").passages.fingerprint == store.fingerprint
    np.testing.assert_array_equal(
        PassageIndex.open(out).embeddings(np.arange(9)), 2 * reader.embeddings(np.arange(9))
    )
    assert [path.name for path in out.parent.iterdir()] == ["index"]


def test_what_is_no_index_is_never_replaced(store, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("home", "file"):
        with pytest.raises(RetrievalError, match="not replaced"):
            build_index(store, Embedder(), tmp_path / name, **INPUTS, overwrite=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "precious"


def nan_at_one(array):
    array[1, 2] = np.nan
    return array


@pytest.mark.parametrize(
    "change, says",
    [
        (nan_at_one, "passage 'p[0-9]+' holds nan at coordinate 2"),
        (lambda array: array * np.float32(1e30), "holds"),
        (lambda array: array[:3], r"shape \(3, 16\)"),
        (lambda array: array[0], r"shape \(16,\)"),
        (lambda array: array[:, :0], r"shape \(4, 0\)"),
        (lambda array: array.astype(str), "real numbers"),
    ],
)
def test_an_embedder_that_returns_nonsense_is_an_error(store, tmp_path, change, says):
    with pytest.raises(RetrievalError, match=says):
        build_index(store, Embedder(change=change), tmp_path / "index", **INPUTS)
    with pytest.raises(RetrievalError, match="half built"):
        PassageIndex.open(tmp_path / "index")


def test_a_damaged_store_is_not_built_from(store, tmp_path):
    shutil.copytree(store.path, tmp_path / "s")
    blob = tmp_path / "s" / "text.blob"
    blob.write_bytes(blob.read_bytes()[::-1])
    with pytest.raises(RetrievalError, match="text.blob differs"):
        build_index(tmp_path / "s", Embedder(), tmp_path / "index", **INPUTS)


def test_too_few_passages_for_scann_are_refused_before_they_are_embedded(store, tmp_path):
    """It came when all of them were embedded, and named no field of the configuration."""
    embed = Embedder()
    for parts, told in ((4, "12"), (60, "0")):
        with pytest.raises(RetrievalError, match=f"{parts} parts, got {told}; set config.retrieval."
                                                 "index=exact .*kind=.exact"):
            build_index(store, embed, tmp_path / "i", **{
                **INPUTS, "kind": "scann", "settings": ScannSettings(parts=parts)})
    assert not embed.shapes and not (tmp_path / "i").exists()


def test_auto_is_exact_where_scann_could_not_learn_its_codes(tmp_path):
    store = make_store(tmp_path / "s", size=15)
    inputs = {**INPUTS, "kind": "auto", "settings": ScannSettings(brute_force_below=0)}
    index = build_index(store, Embedder(), tmp_path / "index", **inputs)
    assert index.manifest["kind"] == "exact"


def test_an_embedder_that_changes_its_width_is_an_error(store, tmp_path):
    calls = []

    def change(array):
        calls.append(1)
        return array[:, : 16 if len(calls) < 10 else 8]

    with pytest.raises(RetrievalError, match="width 8 after width 16"):
        build_index(store, Embedder(change=change), tmp_path / "index", **INPUTS)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"kind": "faiss"}, "kind='faiss'"),
        ({"token_table": "bart"}, "no token table 'bart'"),
        ({"token_table": "empty"}, "'p0' has no tokens"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_length": 0}, "max_length=0"),
    ],
)
def test_inputs_that_cannot_be_built_are_an_error(store, tmp_path, change, says):
    with pytest.raises(RetrievalError, match=says):
        build_index(store, Embedder(), tmp_path / "index", **{**INPUTS, **change})


def test_a_moved_copied_or_renamed_index_works(store, out, tmp_path, monkeypatch):
    expected = PassageIndex.open(out).search(TABLE[:3], 5)
    shutil.copytree(out, tmp_path / "copy")
    (tmp_path / "deep").mkdir()
    out.rename(tmp_path / "deep" / "moved")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "copy", tmp_path / "deep" / "moved", "copy"):
        found = PassageIndex.open(path, "encoder-one", verify=True).search(TABLE[:3], 5)
        np.testing.assert_array_equal(found.ids, expected.ids)
    with pytest.raises(RetrievalError, match="no index here"):
        PassageIndex.open(out)


def test_a_flipped_bit_in_any_file_is_found(out):
    draw = np.random.default_rng(0)
    for file in files_of(out):
        whole = file.read_bytes()
        for place in draw.integers(0, max(1, len(whole)), 5 if whole else 0):
            damaged = bytearray(whole)
            damaged[place] ^= 1
            file.write_bytes(damaged)
            with pytest.raises(RetrievalError, match=str(out)):
                PassageIndex.open(out)
        file.write_bytes(whole)
    PassageIndex.open(out)


def test_a_missing_cut_or_longer_file_is_found_without_reading_all(out):
    for file in files_of(out):
        whole = file.read_bytes()
        for damaged in (None, whole[:-1] or b"x", whole + b" x"):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(RetrievalError, match=str(out)):
                PassageIndex.open(out, verify=False)
        file.write_bytes(whole)


def test_an_index_of_another_encoder_is_refused(out):
    with pytest.raises(RetrievalError, match="encoder-one, asked by encoder-two"):
        PassageIndex.open(out, "encoder-two")


def test_directories_that_hold_no_index_say_what_to_do(out, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RetrievalError, match="empty directory.*build_index"):
        PassageIndex.open(tmp_path / "empty")
    with pytest.raises(RetrievalError, match="no index: it holds"):
        PassageIndex.open(current(out) / "passages")
    with pytest.raises(RetrievalError, match="no index here"):
        PassageIndex.open(tmp_path / "nowhere")
    (current(out) / "manifest.json").unlink()
    with pytest.raises(RetrievalError, match="versions/1/manifest.json is missing"):
        PassageIndex.open(out)
    (out / POINTER).unlink()
    with pytest.raises(RetrievalError, match="half built or half copied"):
        PassageIndex.open(out)


def test_a_manifest_from_a_newer_version_says_upgrade(out):
    manifest = json.loads((current(out) / "manifest.json").read_text())
    (current(out) / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    point(out, out / "versions" / "1")
    with pytest.raises(RetrievalError, match="format 99.*upgrade"):
        PassageIndex.open(out)


def test_other_passages_than_those_embedded_are_refused(out, tmp_path):
    other = make_store(tmp_path / "other", seed=2)
    manifest = json.loads((current(out) / "manifest.json").read_text())
    del manifest["checksum"]
    shutil.rmtree(current(out) / "passages")
    shutil.copytree(other.path, current(out) / "passages")
    with pytest.raises(RetrievalError, match="not the ones it was built from"):
        PassageIndex.open(out)
    manifest["files"] = {"embeddings.f32": manifest["files"]["embeddings.f32"]}
    MANIFEST.write(current(out), manifest)
    point(out, out / "versions" / "1")
    with pytest.raises(RetrievalError, match="not the ones it was built from"):
        PassageIndex.open(out)


@pytest.fixture(scope="module")
def scann_out(store, tmp_path_factory):
    inputs = {**INPUTS, "kind": "auto", "settings": ScannSettings(brute_force_below=50)}
    out = tmp_path_factory.mktemp("scann") / "index"
    build_index(store, Embedder(), out, **inputs)
    return out


def test_why_an_index_is_exact_is_told(caplog):
    """Another brute_force_below than was given was named."""
    for given, told in ((0, "fewer than 32, ScaNN's 16 for each of 2 parts."),
                        (99, "fewer than brute_force_below=99.")):
        with caplog.at_level(logging.INFO, "rag_jax"):
            assert build.choose_kind("auto", 20, ScannSettings(
                brute_force_below=given, parts=2)) == "exact"
        assert told in caplog.text


def test_auto_builds_scann_from_brute_force_below_on(store, scann_out, tmp_path, caplog):
    index = PassageIndex.open(scann_out)
    assert index.manifest["kind"] == "scann" and isinstance(index._parts[0][1], ScannIndex)
    assert index.manifest["recall"]["recall"] > 0.9
    caplog.set_level(logging.INFO)
    inputs = {**INPUTS, "kind": "auto", "settings": ScannSettings(brute_force_below=51)}
    assert build_index(store, Embedder(), tmp_path / "i", **inputs).manifest["kind"] == "exact"
    assert "50 passages are fewer than brute_force_below=51" in caplog.text


def test_a_scann_index_says_what_it_was_tuned_to(store, scann_out, tmp_path):
    """Leaves are counted per query in the manifest, and the inputs stay those asked for."""
    manifest = PassageIndex.open(scann_out).manifest
    assert manifest["recall"]["recall"] >= manifest["recall"]["target"] == 0.99
    assert manifest["scann"]["leaves_to_search"] == 9  # of 9: 50 passages are few
    assert manifest["inputs"]["scann"]["leaves_to_search"] is None
    assert describe(PassageIndex.open(scann_out)).startswith(
        "50 passages, scann, 9 of 9 leaves searched, recall@10 against exact search ")
    given = ScannSettings(brute_force_below=50, leaves_to_search=3)
    untuned = build_index(store, Embedder(), tmp_path / "i", **{
        **INPUTS, "kind": "scann", "settings": given})
    assert untuned.manifest["scann"]["leaves_to_search"] == 3
    assert "target" not in untuned.manifest["recall"]


def test_a_scann_index_from_before_the_tuning_serves_as_it_is(store, scann_out, tmp_path):
    """It has neither tuned leaves nor a target among its inputs: its passages were embedded anew,
    or it was refused as that of other inputs."""
    out = tmp_path / "index"
    shutil.copytree(scann_out, out)
    version = current(out)
    manifest, _ = MANIFEST.read(version)
    del manifest["inputs"]["recall_target"], manifest["recall"]["target"]
    manifest["scann"] = manifest["inputs"]["scann"]
    MANIFEST.write(version, manifest)
    point(out, version)
    embed = Embedder()
    inputs = {**INPUTS, "kind": "auto", "settings": ScannSettings(brute_force_below=50)}
    index = build_index(store, embed, out, **inputs)
    assert not embed.shapes and index.manifest["scann"]["leaves_to_search"] is None
    assert index.search(TABLE[:3], 5).ids.shape == (3, 5)


@pytest.mark.parametrize("target", [0, -1, 1.5, float("nan")])
def test_a_recall_target_that_cannot_be_is_refused(store, tmp_path, target):
    with pytest.raises(RetrievalError, match="more than 0, up to 1"):
        build_index(store, Embedder(), tmp_path / "i", **INPUTS, recall_target=target)


def test_without_scann_auto_is_exact_and_says_so(store, tmp_path, scann_out, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "scann", None)
    inputs = {**INPUTS, "settings": ScannSettings(brute_force_below=0), "kind": "auto"}
    index = build_index(store, Embedder(), tmp_path / "i", **inputs)
    assert index.manifest["kind"] == "exact" and "cannot be imported" in caplog.text
    with pytest.raises(RetrievalError, match="cannot be imported"):
        build_index(store, Embedder(), tmp_path / "j", **{**inputs, "kind": "scann"})
    with pytest.raises(RetrievalError, match='kind="exact"'):
        PassageIndex.open(scann_out)


def test_a_damaged_or_foreign_scann_file_is_found(scann_out, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(scann_out, out)
    for file in sorted((current(out) / "scann").iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(RetrievalError, match=file.name):
            PassageIndex.open(out)
        file.write_bytes(whole)
    (current(out) / "scann" / "scann_docids.pkl").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(RetrievalError, match="scann_docids.pkl does not belong"):
        PassageIndex.open(out, verify=False)


def test_a_moved_scann_index_reads_its_own_files(scann_out, tmp_path):
    expected = PassageIndex.open(scann_out).search(TABLE[:3], 5)
    shutil.copytree(scann_out, tmp_path / "copy")
    (tmp_path / "copy").rename(tmp_path / "moved")
    found = PassageIndex.open(tmp_path / "moved", verify=False).search(TABLE[:3], 5)
    np.testing.assert_array_equal(found.ids, expected.ids)


def test_a_scann_index_that_was_handed_over_loads_first_in_a_child(scann_out, monkeypatch):
    """What the manifest says of versions and digests, anybody can write: no reason for trust."""
    monkeypatch.setattr("rag_jax.retrieval.scann._CHILD", "import os; os.abort()")
    with pytest.raises(RetrievalError, match="status -6"):
        PassageIndex.open(scann_out)


def test_the_store_of_an_index_can_be_rebuilt_into_it(out):
    inputs = {**INPUTS, "encoder_fingerprint": "two"}
    store = PassageStore.open(current(out) / "passages")
    build_index(store, Embedder(), out, **inputs, overwrite=True)
    assert len(PassageIndex.open(out, "two").passages) == 50


def test_a_build_ended_by_sigkill_resumes(store, out, tmp_path):
    code = """if True:
        import os, signal, sys
        from test_build import INPUTS, Embedder, build_index
        class Killed(Embedder):
            def __call__(self, ids, mask):
                if len(self.shapes) == 9:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().__call__(ids, mask)
        build_index(sys.argv[1], Killed(), sys.argv[2], **INPUTS)
    """
    paths = [str(Path(__file__).parent), *(path or "." for path in sys.path)]
    command = [sys.executable, "-c", code, str(store.path), str(tmp_path / "killed")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    embed = Embedder()
    build_index(store, embed, tmp_path / "killed", **INPUTS)
    assert len(embed.shapes) == 13 - 8
    assert content(tmp_path / "killed") == content(out)
