"""Passages that are added and deleted: every answer is that of an index of what is left."""

import dataclasses
import inspect
import json
import os
import shutil

import numpy as np
import pytest

from rag_jax.citation import Citation
from rag_jax.retrieval import build as retrieval_build
from rag_jax.retrieval import editing, publish
from rag_jax.retrieval.bm25 import Bm25Index, build_bm25
from rag_jax.retrieval.build import RecallSettings
from rag_jax.retrieval.editing import edit_index, edit_words
from rag_jax.retrieval.exact import inner_products
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.json_files import digest_of
from rag_jax.retrieval.kept import KeptEmbeddings
from rag_jax.retrieval.manifest import DELETED, EMBEDDINGS, MANIFEST
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import Hosts, Passage, RetrievalError, merge
from rag_jax.retrieval.scann import ScannSettings
from rag_jax.retrieval.shards import PassageEmbedder
from rag_jax.retrieval.store_writing import write_store
from rag_jax.retrieval.verification import file_entry
from rag_jax.retrieval.versions import current, point
from rag_jax.training import verifying
from rag_jax.training.verifying import verify
from tests.retrieval.indexing import build_index
from tests.retrieval.test_build import INPUTS, TABLE, WIDTH, Embedder, content, tokens_of

# ScaNN that looks at every passage and scores each of them exactly.
WHOLE = ScannSettings(num_leaves=2, leaves_to_search=2, pre_reorder_num_neighbors=4096)
KINDS = {"exact": {"kind": "exact"}, "scann": {"kind": "scann", "settings": WHOLE},
         "parts": {"kind": "scann", "settings": ScannSettings(
             num_leaves=2, leaves_to_search=2, pre_reorder_num_neighbors=4096, parts=2)}}
QUERIES = np.random.default_rng(7).standard_normal((6, WIDTH), np.float32)


def passages_of(ids, seed=0):
    draw = np.random.default_rng([seed, len(ids)])
    return [Passage(i, f"title {i}", " ".join(map(str, draw.integers(0, 999, 1 + row % 17))))
            for row, i in enumerate(ids)]


def store_of(path, passages):
    return write_store(path, passages, {"bert": tokens_of, "empty": lambda ps: [[]] * len(ps)})


def embedder(embed=None, **changes):
    inputs = {name: value for name, value in {**INPUTS, **changes}.items() if name != "kind"}
    return PassageEmbedder(embed or Embedder(), progress=False, **inputs)


def vector(passage):
    return TABLE[tokens_of([passage])[0][:12]].mean(0)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    store = store_of(folder / "store", passages_of([f"p{i}" for i in range(64)]))
    for name, settings in KINDS.items():
        build_index(store, Embedder(), folder / name, **{**INPUTS, **settings})
    return folder


@pytest.fixture
def edit(built, tmp_path):
    """Edits a copy of an index; and what its passages are then, by id."""
    class Edit:
        def __init__(self, kind="exact"):
            self.out = shutil.copytree(built / kind, tmp_path / kind)
            self.passages = {p.id: p for p in PassageStore.open(built / "store")}
            self.count = 0

        def store(self, passages):
            self.count += 1
            return store_of(tmp_path / f"{self.out.name}-{self.count}", passages)

        def __call__(self, add=(), delete=(), **how):
            added = self.store(add) if add else None
            edit_index(self.out, how.pop("embedder", embedder()), added, delete, **how)
            for passage_id in delete:
                del self.passages[passage_id]
            self.passages |= {p.id: p for p in add}
            return PassageIndex.open(self.out)

    return Edit


def check(index, passages, k):
    """Against brute force over the passages, by id."""
    found = index.search(QUERIES, k)
    vectors = np.stack([vector(p) for p in passages.values()])
    scores = inner_products(QUERIES[:, None], vectors)
    best = -np.sort(-scores, axis=1)[:, :k]
    np.testing.assert_allclose(found.scores, best, rtol=1e-5, atol=1e-6)
    for query, ids in zip(QUERIES, found.ids, strict=True):
        got = [index.passages[int(row)] for row in ids]
        assert len({p.id for p in got}) == k and all(passages[p.id] == p for p in got)
        np.testing.assert_allclose(sorted(-query @ vector(p) for p in got), sorted(
            -query @ v for v in index.embeddings(ids)), rtol=1e-4, atol=1e-5)
    assert index.size == len(passages)


def check_passages(index, passages):
    """Texts, tokens and ids of every row that counts, as the store of all would have them."""
    rows = np.array([index.passages.row_of(passage_id) for passage_id in passages])
    tokens, expected = index.passages.tokens("bert"), tokens_of(list(passages.values()))
    assert tokens.lengths_of(rows).tolist() == [len(row) for row in expected]
    assert [tokens.row(int(row)).tolist() for row in rows] == expected
    ids, mask = tokens.padded(rows[None], 4, 999)
    for row, padded, real in zip(expected, ids[0], mask[0], strict=True):
        assert padded.tolist() == (row + [999] * 4)[:4] and real.sum() == min(4, len(row))


@pytest.mark.parametrize("kind", KINDS)
def test_after_every_edit_a_search_is_brute_force_over_what_is_left(edit, kind):
    """Adding, deleting what was built and what was added, replacing; one edit after another."""
    edit = edit(kind)
    steps = [
        ([f"a{i}" for i in range(9)], []),
        ([], ["p3", "p63", "a2"]),
        (["p3", "a2", "b0"], ["a5"]),
        (["p7"], ["p7"]),
        ([], [f"a{i}" for i in (0, 1, 2, 3, 4, 6, 7, 8)] + ["p3", "b0", "p7"]),
    ]
    for number, (add, delete) in enumerate(steps):
        embed = Embedder()
        index = edit(passages_of(add, number), delete, embedder=embedder(embed))
        for k in (1, 7, index.size):
            check(index, edit.passages, k)
        check_passages(index, edit.passages)
        assert len(embed.shapes) == -(-len(add) // 4), "only what is new, in batches of 4"
        assert index.manifest["recall"]["recall"] >= (1.0 if kind == "exact" else 0.99)
        for passage_id in delete:
            if passage_id not in edit.passages:
                with pytest.raises(RetrievalError, match=f"has the id '{passage_id}'"):
                    index.passages.row_of(passage_id)
    assert index.manifest["kind"] == KINDS[kind]["kind"]
    assert index.manifest["edited"]["deleted"] == 3 and len(index.passages) == 64
    assert [part.damage for part in verify(edit.out)] == [[]]


def test_queries_whose_nearest_are_deleted_are_answered_in_full(edit):
    """ScaNN nominates twice as many; of deleted ones alone, exact search has to answer."""
    edit = edit("scann")
    order = np.argsort([-QUERIES[0] @ vector(p) for p in edit.passages.values()])
    near = [list(edit.passages)[row] for row in order]
    check(edit(delete=near[:3]), edit.passages, 5)
    check(edit(delete=near[3:20]), edit.passages, 5)


def test_a_compacted_index_is_the_one_that_a_build_makes(edit, built, tmp_path):
    for kind in ("exact", "scann"):
        edited = edit(kind)
        edited(passages_of(["a0", "a1"]), ["p5"])
        index = edited(passages_of(["b0"], 1), ["a0", "p6"], compact=True)
        check(index, edited.passages, 7)
        store = store_of(tmp_path / f"fresh-{kind}", list(edited.passages.values()))
        fresh = tmp_path / f"{kind}-fresh"
        build_index(store, Embedder(), fresh, **{**INPUTS, **KINDS[kind]})
        both = [content(current(out)) for out in (edited.out, fresh)]
        for files in both:
            del files["manifest.json"]
        assert both[0].keys() == both[1].keys()
        np.testing.assert_allclose(  # a passage's batch changes its embedding by rounding
            *(np.frombuffer(files.pop(EMBEDDINGS), "<f4") for files in both), rtol=1e-5)
        assert {name for name in both[0] if both[0][name] != both[1][name]} <= {
            name for name in both[0] if name.startswith("scann/")}
        assert index.manifest["edited"] == {"added": 0, "deleted": 0}


def test_an_index_is_compacted_when_edits_double_the_time_of_a_search(edit, monkeypatch):
    edited = edit("exact")
    ids = list(edited.passages)
    assert edited(passages_of([f"a{i}" for i in range(200)]), ids[:32]).manifest["size"] == 64
    assert edited(delete=ids[32:33]).manifest["size"] == 231, "more than half was deleted"
    check(PassageIndex.open(edited.out), edited.passages, 7)
    edited = edit("scann")
    work = WHOLE.work(64)  # 2 x 64 codes, and 4,096 candidates scored again
    monkeypatch.setattr(editing, "EXACT_ROW", work / 3)
    assert edited(passages_of(["a0", "a1", "a2"])).manifest["size"] == 64
    assert edited(passages_of(["a3"])).manifest["size"] == 68
    edited(passages_of([f"b{i}" for i in range(4)]), compact=False)
    assert edited(delete=list(edited.passages)[8:]).manifest["kind"] == "exact", "too few for ScaNN"
    check(PassageIndex.open(edited.out), edited.passages, 7)


def test_an_index_that_grows_is_of_the_kind_that_a_build_would_choose(tmp_path):
    """One that was small when it was built stayed exact for ever, compacted or not."""
    settings = ScannSettings(num_leaves=2, leaves_to_search=2, pre_reorder_num_neighbors=4096,
                             brute_force_below=40)
    how = {**INPUTS, "kind": "auto", "settings": settings}
    store, out = store_of(tmp_path / "s", passages_of([f"p{i}" for i in range(20)])), tmp_path / "i"
    build_index(store, Embedder(), out, **how)
    passages = {p.id: p for p in store}

    def edited(added=(), deleted=(), **compact):
        more = store_of(tmp_path / added[0].id, added) if added else None
        edit_index(out, embedder(), more, deleted, **compact)
        passages.update({p.id: p for p in added})
        for passage_id in deleted:
            del passages[passage_id]
        index = PassageIndex.open(out)
        check(index, passages, 7)
        return index.manifest["kind"], index.manifest["size"]

    assert edited(passages_of([f"a{i}" for i in range(19)])) == ("exact", 20)
    assert edited(passages_of(["b0"]), compact=False) == ("exact", 20)
    assert edited(passages_of(["b1"])) == ("scann", 41), "a build would take ScaNN from 40 on"
    assert PassageIndex.open(out).manifest["scann"] == dataclasses.asdict(settings)
    assert build_index(store, Embedder(fail_after=0), out, **how).size == 41, "it serves as it is"
    assert edited(deleted=["b0", "b1"], compact=True) == ("exact", 39)
    edited(passages_of(["c0", "c1"]))
    manifest, _ = MANIFEST.read(current(out))
    assert manifest["kind"] == "scann" and manifest["inputs"]["kind"] == "exact"


def test_who_has_it_open_keeps_its_version_and_a_killed_edit_embeds_no_shard_twice(edit):
    edit = edit("exact")
    reader = PassageIndex.open(edit.out)
    before = reader.search(QUERIES, 5)
    added = edit.store(passages_of([f"a{i}" for i in range(40)]))
    whole, killed, again = Embedder(), Embedder(fail_after=8), Embedder()
    with pytest.raises(KeyboardInterrupt):  # shards of 16 passages are 4 batches
        edit_index(edit.out, embedder(killed), added, ["p1"])
    check(PassageIndex.open(edit.out), edit.passages, 7)
    edit_index(edit.out, embedder(again), added, ["p1"])
    edit_index(edit.out, embedder(whole), edit.store(passages_of([f"b{i}" for i in range(40)])))
    assert (len(whole.shapes), len(again.shapes)) == (10, 2)
    np.testing.assert_array_equal(reader.search(QUERIES, 5).ids, before.ids)
    assert reader.passages.row_of("p1") == 1 and PassageIndex.open(edit.out).size == 143


def test_an_edit_that_was_killed_at_its_end_is_published_by_the_next(edit, monkeypatch, caplog):
    """Another edit published it without a word."""
    edit = edit("exact")
    with monkeypatch.context() as patched:
        patched.setattr(publish, "point", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            edit(delete=["p1"])
    assert PassageIndex.open(edit.out).size == 64
    with pytest.raises(RetrievalError, match="'p1'.* that was killed may have deleted it"):
        edit(delete=["p1"])
    assert "a killed process had made is complete, and published now as version 2" in caplog.text
    assert edit(delete=["p2"]).size == 62 and caplog.text.count("published") == 1


@pytest.mark.parametrize("shard_rows", [8, 32])
def test_a_killed_edit_goes_on_with_shards_of_another_size(edit, shard_rows):
    """The mark of a smaller shard counted for a larger one: its other rows were zeros."""
    edit = edit("exact")
    added = passages_of([f"a{i}" for i in range(40)])
    store = edit.store(added)
    with pytest.raises(KeyboardInterrupt):
        edit_index(edit.out, embedder(Embedder(fail_after=4)), store)  # one shard of 16 is done
    edit_index(edit.out, embedder(shard_rows=shard_rows), store)
    check(PassageIndex.open(edit.out), edit.passages | {p.id: p for p in added}, 7)


def test_what_is_kept_of_an_index_is_not_embedded_and_a_killed_build_goes_on(edit, tmp_path):
    edit = edit("exact")
    kept, old = KeptEmbeddings(PassageIndex.open(edit.out)), list(edit.passages.values())
    new = passages_of([f"a{i}" for i in range(80)], seed=1)
    store = edit.store([passage for pair in zip(old, new, strict=False) for passage in pair]
                       + new[len(old):] + [Passage("copy", *new[0][1:])])
    whole, killed, again = Embedder(), Embedder(fail_after=8), Embedder()

    def build(embed, name):
        return retrieval_build.build_index(
            store, kept.around(embedder(embed), store), tmp_path / name, kind="exact")

    expected = build(whole, "whole")
    assert kept.embedded == 80 and len(whole.shapes) < 36, "it took 37 for all of them"
    for row in range(len(store)):
        np.testing.assert_allclose(expected.embeddings([row])[0], vector(store[row]), rtol=1e-5)
    with pytest.raises(KeyboardInterrupt):
        build(killed, "killed")
    index = build(again, "killed")
    np.testing.assert_array_equal(index.embeddings(np.arange(len(store))),
                                  expected.embeddings(np.arange(len(store))))
    assert len(again.shapes) < len(whole.shapes) - 3


def test_new_embeddings_are_held_no_longer_than_they_are_needed(edit, tmp_path):
    """All of them lay in memory until the end, of a corpus of any size."""
    edit = edit("exact")
    new = passages_of([f"a{i}" for i in range(80)], seed=1)
    store = edit.store([*new, Passage("copy", *new[0][1:])])
    around = KeptEmbeddings(PassageIndex.open(edit.out)).around(embedder(), store)
    retrieval_build.build_index(store, around, tmp_path / "new", kind="exact")
    assert inspect.getclosurevars(around.embed).nonlocals["fresh"].keys() == {0}


def test_verify_finds_no_damage_where_another_process_publishes(edit, monkeypatch):
    """Between its pointer and its files an index was edited, and its old version removed."""
    edit = edit("exact")
    edit(delete=["p1"])
    real, left = verifying.open_folder, [passages_of([f"a{i}"]) for i in range(2)]

    def meanwhile(folder):
        while left:
            edit(left.pop())
        return real(folder)

    monkeypatch.setattr(verifying, "open_folder", meanwhile)
    assert [part.damage for part in verifying.verify(edit.out)] == [[]]


def test_hosts_find_together_what_the_whole_index_finds(edit):
    edit = edit("parts")
    whole = edit(passages_of(["a0", "a1", "a2"]), ["p1", "p60"])
    for k in (3, 60):
        found = [PassageIndex.open(edit.out, hosts=Hosts(host, 2)).search(QUERIES, k)
                 for host in range(2)]
        np.testing.assert_array_equal(merge(found, k).ids, whole.search(QUERIES, k).ids)


def test_recall_is_measured_on_the_questions_and_tuned_where_it_fell_below_its_target(
        edit, built, tmp_path):
    store = PassageStore.open(built / "store")
    out = tmp_path / "tuned"
    build_index(store, Embedder(), out, **{**INPUTS, "kind": "scann", "settings": ScannSettings(
        num_leaves=8, pre_reorder_num_neighbors=64)}, recall_queries=QUERIES[:1], recall_k=1)
    before = PassageIndex.open(out).manifest
    edit_index(out, embedder(), deleted=["p1"],
               recall=RecallSettings(np.tile(QUERIES, (3, 1)), k=20))
    found = PassageIndex.open(out).manifest
    assert before["recall"]["target"] == found["recall"]["target"] == 0.99
    assert found["recall"]["queries"] == 18 and found["recall"]["k"] == 20
    assert found["recall"]["recall"] >= 0.99
    assert found["scann"] != found["inputs"]["scann"] == before["inputs"]["scann"]


def test_files_without_links_are_copied(edit, monkeypatch):
    edit = edit("exact")
    edit(passages_of(["a0"]))

    def no_links(*_, **__):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    index = edit(passages_of(["a1"]), ["p9"])
    check(index, edit.passages, 7)
    assert (current(edit.out) / EMBEDDINGS).stat().st_nlink == 1


@pytest.mark.parametrize("how, message", [
    ({"delete": ["p99"]}, "has the id 'p99'; near matches are .*p9.* was killed may have deleted"),
    ({"add": ["p4"]}, "has a passage 'p4'; to replace it, delete it.* was killed may have added"),
    ({"delete": [f"p{i}" for i in range(64)]}, "nothing would be left"),
    ({"add": ["x"], "embedder": {"encoder_fingerprint": "other"}}, "built by the encoder"),
    ({"add": ["x"], "embedder": {"max_length": 4}}, "built with max_length=12, .* with 4; edit"),
    ({"add": ["x"], "embedder": {"token_table": "empty"}}, "built with token_table='bert'"),
    ({"add": ["x"], "change": lambda x: x[:, :9]}, "width 16, the embedder returned 9"),
])
def test_what_cannot_be_is_refused_and_leaves_the_index_as_it_was(edit, how, message):
    edit = edit("exact")
    before = content(edit.out)
    changed = embedder(Embedder(change=how.get("change", lambda x: x)), **how.get("embedder", {}))
    with pytest.raises(RetrievalError, match=message):
        edit(passages_of(how.get("add", ())), how.get("delete", ()), embedder=changed)
    assert {name: data for name, data in content(edit.out).items()
            if ".rag_jax-work/" not in name} == before
    assert edit().size == 64, "nothing to do"


def test_no_index_is_made_where_there_is_none(tmp_path):
    with pytest.raises(RetrievalError, match="no index here"):
        edit_index(tmp_path / "index", embedder(), deleted=["p1"])
    assert not (tmp_path / "index").exists()


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.unlink()  # other versions have other files
    path.write_bytes(data)


@pytest.mark.parametrize("name", [EMBEDDINGS, f"added/{EMBEDDINGS}", DELETED,
                                  "added/passages/text.blob"])
def test_damage_is_named_and_an_edit_does_not_cover_it(edit, name):
    """With new digests of files that are taken over, damage would be sound from then on."""
    edit = edit("exact")
    edit(passages_of(["a0", "a1"]), ["p1"])
    version = current(edit.out)
    flip(version / name, -1)
    with pytest.raises(RetrievalError, match=name.rpartition("/")[2]):
        PassageIndex.open(edit.out)
    (part,) = verify(edit.out)
    assert part.damage
    with pytest.raises(RetrievalError):
        edit(delete=["p2"])
    assert current(edit.out) == version


@pytest.mark.parametrize("change", [
    {"added": 1}, {"added": -1}, {"deleted": 2}, {"deleted": 65}, {"added": True},
    {"passages_fingerprint": None}, {"passages_fingerprint": "0" * 64}, [],
    {"rows": [64]}, {"rows": [-1]}, {"rows": [3, 3]}, {"rows": [4, 3]}])
def test_an_edited_index_that_says_what_cannot_be_is_refused(edit, change):
    """Whoever handed it over can make every digest."""
    edit = edit("exact")
    edit(passages_of(["a0", "a1"]), ["p1"])
    version = current(edit.out)
    manifest, _ = MANIFEST.read(version)
    if isinstance(change, list):
        manifest["edited"] = change
    elif "rows" in change:
        (version / DELETED).write_bytes(np.array(change["rows"], "<i8").tobytes())
        manifest["edited"]["deleted"] = len(change["rows"])
        manifest["files"][DELETED] = file_entry(version / DELETED)
    else:
        manifest["edited"] |= change
    (version / "manifest.json").write_text(json.dumps({**manifest, "checksum": digest_of(
        manifest)}))
    point(edit.out, version)
    with pytest.raises(RetrievalError, match="manifest.json|not the ones it was built from"):
        PassageIndex.open(edit.out)


def test_a_build_takes_an_edited_index_as_it_is_and_overwrite_replaces_it(edit, built):
    edit = edit("exact")
    edit(passages_of(["a0"]))
    store = PassageStore.open(built / "store")
    built_again = build_index(store, Embedder(fail_after=0), edit.out, **INPUTS)
    assert built_again.size == 65
    assert build_index(store, Embedder(), edit.out, **INPUTS, overwrite=True).size == 64


def test_words_are_counted_anew(edit, built, tmp_path):
    words = [Passage(f"w{i}", "", text) for i, text in enumerate(
        ["red tree", "old house", "green tree", "river"])]
    store = store_of_words(tmp_path / "words", words)
    build_bm25(store, tmp_path / "index")
    more = store_of_words(tmp_path / "more", [Passage("w9", "", "house of the river")])
    edit_words(tmp_path / "index", more, ["w0"])
    index = Bm25Index.open(tmp_path / "index")
    fresh = build_bm25(store_of_words(tmp_path / "fresh", [
        *words[1:], Passage("w9", "", "house of the river")]), tmp_path / "other")
    found, expected = (one.search(["tree by the river", "house"], 4) for one in (index, fresh))
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.scores, expected.scores)
    assert [p.id for p in Bm25Index.open(tmp_path / "index").passages] == ["w1", "w2", "w3", "w9"]
    with pytest.raises(RetrievalError, match="an index of kind 'bm25'"):
        edit_index(tmp_path / "index", embedder(), deleted=["w1"])


def test_passages_of_documents_keep_their_places_beside_others(edit, tmp_path):
    """An index of documents to which somebody adds a passage of no document."""
    places = {f"d{i}": Citation(f"{i}.md", (i, i + 9), (), ("Part",)) for i in range(3)}
    edit = edit("exact")
    cited = write_store(tmp_path / "cited", passages_of(places), {
        "bert": tokens_of, "empty": lambda ps: [[]] * len(ps)}, source=places.get)
    edit_index(edit.out, embedder(), cited, ["p1"])
    for index in (edit(passages_of(["a0"])), edit(delete=["p2"], compact=True)):
        for name in ("d0", "d2", "a0", "p3"):
            assert index.passages.source(index.passages.row_of(name)) == places.get(name)


def store_of_words(path, passages):
    return write_store(path, passages, {"ids": lambda ps: [[1]] * len(ps)})
