"""The abstract arguments are what training and answering would really give."""

import jax
import numpy as np
import pytest
import tiny

from rag_jax import parallel
from rag_jax.aot import programs
from rag_jax.config import Config, ConfigError, MeshConfig
from rag_jax.config.overrides import replace
from rag_jax.data.batches import ENCODER_TABLE, PASSAGE_TABLE, RagBatcher
from rag_jax.data.packed import Groups
from rag_jax.data.question_files import Example
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.text import GeneratorFormat
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.models.generator import MATRICES
from rag_jax.retrieval.device import DeviceIndex, abstract_tables
from rag_jax.retrieval.protocol import Passage
from rag_jax.retrieval.store_writing import write_store
from rag_jax.training import on_device
from rag_jax.training.indexing import batch_shapes
from tests.retrieval.indexing import build_index

LONGEST = {"data.max_question_length": 10, "data.max_source_length": 24,
           "data.max_target_length": 6, "data.max_passage_length": 16, "train.batch_size": 8,
           "retrieval.k": 3}


def config(**changes):
    """The tiny towers with the given fields replaced."""
    towers = {"model.retriever.width": tiny.BERT.width, "model.retriever.heads": 2,
              "model.generator.width": tiny.BART.width, "model.generator.heads": 2}
    return replace(Config(), {**LONGEST, **towers, **changes})


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(questions with long inputs, an index of 40 passages, of which the last four are short)."""
    texts = [f"word{i % 7} other{i} and more of it" for i in range(40)]
    bart, bert = train_bart_tokenizer(texts, 350), train_bert_tokenizer(texts, 120)
    format = GeneratorFormat(bart, 24)
    examples = [Example(str(i), text * 4, (text,)) for i, text in enumerate(texts)]
    path = tmp_path_factory.mktemp("world")
    passages = [Passage(str(i), "", t * 4 if i < 36 else "it") for i, t in enumerate(texts)]
    store = write_store(path / "store", passages, {
        PASSAGE_TABLE: lambda ps: format.passages([""] * len(ps), [p.text for p in ps]),
        ENCODER_TABLE: lambda ps: [[2, 5, 3]] * len(ps)})
    index = build_index(
        store, lambda ids, mask: np.ones((len(ids), 16), np.float32), path / "index",
        token_table=PASSAGE_TABLE, encoder_fingerprint="random", max_length=8, batch_size=8,
        length_buckets=(8,), kind="exact", progress=False)
    return QuestionTokens(examples, bert, format, 10, 6), index


def described(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)


def abstract(mesh, source_tokens=0, **changes):
    (program,) = programs.programs(
        config(**{"runs": ("rag_token",), **changes}), mesh, passages=40, kinds=["train"],
        source_tokens=source_tokens)
    return program.arguments[1]


def test_batches_of_the_host_have_these_shapes(world):
    questions, index = world
    mesh = parallel.make_mesh(MeshConfig(4, 2))
    batch = RagBatcher(questions, 24, 16).batch(
        np.arange(8), np.arange(24, dtype=np.int32).reshape(8, 3), index)
    assert described(abstract(mesh)) == described(parallel.put_rows(batch, mesh))
    null = RagBatcher(questions, 24, 16, null_document=True).batch(
        np.arange(8), np.arange(24, dtype=np.int32).reshape(8, 3), index)
    assert described(abstract(mesh, **{"model.null_document": "bias"})) == (
        described(parallel.put_rows(null, mesh)))
    words = abstract(mesh, runs=("bm25",))
    assert words.doc_embeddings is None and words.doc_scores.shape == (8, 3)
    closed = parallel.put_rows(RagBatcher(questions, 24, 16).batch(np.arange(8), None), mesh)
    found = abstract(mesh, **{"retrieval.k": 0})
    alone = {"source_ids": None, "source_mask": None}  # a question without a passage is shorter
    assert described(found._replace(**alone)) == described(closed._replace(**alone))


@pytest.mark.parametrize("sizes, groups", [((4, 2), 8), ((2, 1, 4), 2)])
def test_packed_batches_of_the_host_have_these_shapes(world, sizes, groups):
    """One passage of each question is long, the others are short."""
    questions, index = world
    mesh, few = parallel.make_mesh(MeshConfig(*sizes)), {"data.length_buckets": 4}
    rows, found = np.arange(8), np.array([[i, 36, 37] for i in range(8)], np.int32)
    batcher = RagBatcher(questions, 4, 16, groups=Groups(groups))
    batch = batcher.batch(rows, found, index)
    by_group = batch.source_mask.reshape(groups, -1)
    mean = -(-int(by_group.sum(axis=1).max()) // (24 // groups))
    assert batch.source_places.shape < by_group.shape
    assert described(abstract(mesh, mean, **few)) == described(parallel.put_rows(batch, mesh))
    assert described(abstract(mesh, 0, **few)) == described(abstract(mesh))
    least = abstract(mesh, 1, **few).source_places.shape
    assert least[0] == groups and 24 <= least[1] < 24 + 12, "one input is of the longest"


@pytest.mark.parametrize("source_tokens, changes", [
    (1, {"retrieval.where": "device"}), (1, {"data.length_buckets": 8}),
    (24, {"data.length_buckets": 4}), (1, {"data.length_buckets": 4, "retrieval.k": 1})])
def test_tokens_of_inputs_that_are_never_packed_are_refused(source_tokens, changes):
    """The figures were those of all inputs of the longest, and the help says that they are packed.
    """
    with pytest.raises(ConfigError, match=f"--source_tokens={source_tokens}: no inputs are packed"):
        abstract(parallel.make_mesh(MeshConfig(4, 2)), source_tokens, **changes)


def test_a_batch_of_fewer_questions_than_devices_cannot_be_split():
    with pytest.raises(ConfigError, match="a batch of 1 rows cannot be split over 8 devices"):
        abstract(parallel.make_mesh(MeshConfig(4, 2)), 9,
                 **{"train.batch_size": 1, "data.length_buckets": 4})


@pytest.mark.parametrize("dtype,encoder", [
    ("float32", "frozen"), ("bfloat16", "refresh"), ("int8", "frozen")])
def test_what_lies_on_the_devices_has_these_shapes(world, dtype, encoder):
    questions, index = world
    mesh = parallel.make_mesh(MeshConfig(4, 2))
    changes = {"retrieval.where": "device", "retrieval.device_dtype": dtype,
               "train.document_encoder": encoder, "retrieval.capacity": 9000}
    settings, tables = on_device.layout(config(**changes), questions.format)
    placed = DeviceIndex(index, mesh, settings, tables)
    found = abstract_tables(40, 16, mesh, settings, tables)
    assert described(found) == described(placed.tables)
    source = on_device.QuestionSource(questions, placed, 8, seed=0)
    given = source.finish(0)
    expected = abstract(mesh, **changes)
    assert described(expected[0]) == described(given[0])
    assert jax.tree.structure(expected) == jax.tree.structure(given)


def test_a_classifier_has_a_question_for_its_decoder_and_a_class_for_its_target():
    """It had no decoder_ids, and asked for compile_report ended in a TypeError."""
    mesh = parallel.make_mesh(MeshConfig())
    batch = abstract(mesh, **{"model.head": "classification", "eval.labels": ("a", "b")})
    assert batch.target_ids.shape == (8, 1) and batch.decoder_ids.shape == batch.decoder_mask.shape


def test_what_answers_and_embeds_is_given_rounded_matrices():
    """A model whose param_dtype is bfloat16 was said to need twice its memory."""
    mesh = parallel.make_mesh(MeshConfig(4, 2))

    def given(param_dtype, **changes):
        changed = config(**{
            "runs": ("rag_token",), "model.generator.dtype": "bfloat16",
            "model.retriever.dtype": "bfloat16", "model.generator.param_dtype": param_dtype})
        return {program.name.split()[0]: program for program in programs.programs(
            changed, mesh, kinds=["evaluate", "decode", "embed"], **changes)}

    def matrices(params, names):
        return [x.dtype for path, x in jax.tree_util.tree_leaves_with_path(params)
                if path[-1].key in names]

    floats, halves = given("float32"), given("bfloat16")
    for kind in ("evaluate", "decode"):
        dtypes = [matrices(program[kind].arguments[0]["generator"], MATRICES)
                  for program in (floats, halves)]
        assert dtypes[0] == dtypes[1] == [np.dtype("bfloat16")] * len(dtypes[0])
        assert len(floats[kind].unrounded) == len(dtypes[0]) and not halves[kind].unrounded
    kernels = matrices(halves["embed"].arguments[0], ["kernel"])
    assert kernels == [np.dtype("bfloat16")] * len(halves["embed"].unrounded)
    sharded = given("float32", hosts=2)["embed"].unrounded
    assert len(sharded) == len(jax.tree.leaves(floats["embed"].arguments[0])), "all are gathered"


def test_what_is_asked_for_is_compiled_or_refused():
    """The report was shorter, or empty, and said nothing of it."""
    mesh = parallel.make_mesh(MeshConfig(4, 2))

    def names(kinds=programs.KINDS, **changes):
        return [program.name for program in programs.programs(config(**changes), mesh, kinds=kinds)]

    words = {"runs": ("bm25",)}
    assert "embed passages" not in names(**words)
    with pytest.raises(ConfigError, match="--programs=embed: .*by words embeds no passages"):
        names(["embed", "train"], **words)
    with pytest.raises(ConfigError, match="--programs=search: .*by words embeds no passages"):
        names(["search"], **words)
    with pytest.raises(ConfigError, match="--programs=search: of how many passages"):
        names(["search", "embed"], runs=("rag_token",))
    alone = {"runs": ("closed_book",), "retrieval.where": "device"}
    assert names(["train"], **alone) == ["train closed_book"], "it reads no passages"


def test_what_cannot_be_compiled_is_an_error_that_says_why():
    mesh = parallel.make_mesh(MeshConfig())

    def error(**changes):
        with pytest.raises(ConfigError) as raised:
            list(programs.programs(config(**changes), mesh))
        return str(raised.value)

    assert "how many passages? give --passages" in error(**{"retrieval.where": "device"})
    assert "a batch of 12 rows cannot be split over 8" in error(**{"train.batch_size": 12})
    assert "vocab_size=0: the tokenizer's size" in error(
        **{"model.generator.vocab_size": 0, "data.generator_tokenizer": "folder"})
    assert "bad_words, prefix and labels" in error(**{"eval.prefix": "The"})


def test_a_classifier_is_compiled_without_its_decoding():
    """Nothing of it was, or only after its training had been compiled, and the advice was to leave
    out the labels, which it needs."""
    classes = {"model.head": "classification", "eval.labels": ("yes", "no"),
               "runs": ("rag_token",)}
    mesh = parallel.make_mesh(MeshConfig(4, 2))
    with pytest.raises(ConfigError, match="compiled; set --programs=train,evaluate,embed,search"):
        next(programs.programs(config(**classes), mesh))
    (program,) = programs.programs(config(**classes), mesh, kinds=["evaluate"])
    assert program.name == "evaluate rag_token" and program.jitted.trace(*program.arguments)


def test_passages_are_embedded_as_many_at_a_time_as_by_the_builder():
    many, mesh = config(**{"retrieval.embed_batch_size": 64}), parallel.make_mesh(MeshConfig(4, 2))
    (program,) = programs.programs(many, mesh, kinds=["embed"])
    assert program.arguments[1].shape[0] == batch_shapes(many, mesh)[0] == 8


def test_a_tokenizer_that_will_be_trained_has_the_size_asked_for():
    sizes = {"model.retriever.vocab_size": 0, "model.generator.vocab_size": 0,
             "data.retriever_vocab": 600, "data.generator_vocab": 2048}
    job = programs.job_of(config(**sizes), parallel.make_mesh(MeshConfig()))
    assert job.model.retriever.vocab_size == 600 and job.model.generator.vocab_size == 2048
