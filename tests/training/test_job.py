"""What names a document encoder, by which an index belongs to it; questions that runs share."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import tokenizers

from rag_jax import hosts
from rag_jax.config import BartConfig, BertConfig, Config, ConfigError
from rag_jax.config.overrides import replace
from rag_jax.data.prepared import Prepared
from rag_jax.data.question_files import Example
from rag_jax.data.text import Tokenizer
from rag_jax.models import rag
from rag_jax.training import job


@pytest.fixture
def prepared_with():
    """Prepared data of one tokenizer for both towers."""
    return lambda tokenizer: Prepared(tokenizer, tokenizer, SimpleNamespace(start=None), {}, {})


def test_the_fingerprint_of_an_encoder_does_not_depend_on_the_version():
    """Fields of a config in another order made every index there was one of another encoder."""
    encoder = BertConfig(vocab_size=7, width=4, heads=2, layers=1, dtype="bfloat16")
    model = rag.RagModel(encoder, BartConfig(), "token", 2, 2, 1, "none", False, 0)
    params = {"embedding": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert job.fingerprint(model, params) == "3625c0ad0f23f7f4"
    again = dataclasses.replace(model, retriever=dataclasses.replace(encoder, remat="full"))
    assert job.fingerprint(again, params) == "3625c0ad0f23f7f4", "it may change"
    wider = dataclasses.replace(model, retriever=dataclasses.replace(encoder, mlp_width=8))
    assert job.fingerprint(wider, params) != job.fingerprint(model, params)
    how = {"fused_attention", "learn_scale"}  # is computed or trained, no part of what it gives
    beyond = {"projection_tanh": True, "pooling": "mean", "normalize": True, "scale": 3.0,
              "model_type": "roberta", "query_prefix": "q", "passage_prefix": "p",
              "titles": "joined"}
    fields = {field.name for field in dataclasses.fields(BertConfig)}
    assert {*job._ARCHITECTURE, *job._MODERN, *how, *beyond} == fields
    made = {job.fingerprint(dataclasses.replace(model, retriever=dataclasses.replace(
        encoder, **{name: value})), params) for name, value in beyond.items()}
    assert len(made) == len(beyond) and "3625c0ad0f23f7f4" not in made
    said = {"pooling": "cls", "normalize": False, "scale": 1.0, "query_prefix": "",
            "passage_prefix": "", "titles": "separate"}  # what a DPR tower does anyway
    same = dataclasses.replace(model, retriever=dataclasses.replace(encoder, **said))
    assert job.fingerprint(same, params) == "3625c0ad0f23f7f4"


def test_the_first_of_several_ends_is_what_answers_are_written_with(prepared_with):
    """Another would have the sum, and the end that is searched for no probability at all."""
    def ends(given, own=3):
        tokenizer = SimpleNamespace(vocab_size=10, needed_rows=10, end=3, own_end=own, pad=1)
        config = replace(Config(), {"model.generator.end_tokens": given,
                                    "model.generator.vocab_size": 10})
        return job.build_model(config, prepared_with(tokenizer)).generator.end_tokens

    assert [ends(given) for given in ((), (5, 3), (5, 4))] == [(), (3, 5), (3, 5, 4)]
    assert ends((), own=7) == (3, 7), "a base model ends a chat with its own token"
    assert ends((5, 3), own=7) == (3, 5), "the checkpoint goes first"
    with pytest.raises(ConfigError, match="end_tokens=.*must be below vocab_size=10"):
        ends((3, 10))


def test_a_mask_needs_no_row_where_nobody_reads_it(prepared_with):
    """bart-large-cnn's is the last of the tokenizer, and its table has no row for it: it was
    refused, by an error whose advice gave the same error."""
    backend = tiny.html_tokenizer()
    backend.add_special_tokens(["<last>"])
    tokenizer = Tokenizer(backend, {"eos_token": "<eos>", "mask_token": "<last>"})
    rows = tokenizer.vocab_size - 1
    smaller = replace(Config(), {"model.retriever.vocab_size": 0, "model.generator.start_token": 1,
                                 "model.generator.vocab_size": rows})
    with pytest.raises(ConfigError, match=f"need {rows + 1} rows; set at least that"):
        job.build_model(smaller, prepared_with(tokenizer))  # its warm-up reads it
    named = replace(smaller, {"model.generator.pretrained": "cnn"})
    assert job.build_model(named, prepared_with(tokenizer)).generator.vocab_size == rows
    short = replace(named, {"model.generator.vocab_size": rows - 1})
    with pytest.raises(ConfigError, match="name the tokenizer that cnn was trained with"):
        job.build_model(short, prepared_with(tokenizer))


def test_a_table_has_a_row_for_every_id_where_ids_leave_some_out(prepared_with):
    """By the number of tokens it had too few, and all ids beyond were read as the last one."""
    words = {"<s>": 0, "</s>": 1, "<pad>": 2, "<mask>": 3, "a": 9}
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "a")))
    own = replace(Config(), {"model.retriever.vocab_size": 0, "model.generator.vocab_size": 0})
    model = job.build_model(own, prepared_with(tokenizer))
    assert model.retriever.vocab_size == model.generator.vocab_size == 10
    for tower in ("retriever", "generator"):
        with pytest.raises(ConfigError, match=f"{tower}.vocab_size=5: .* need 10 rows"):
            job.build_model(replace(own, {f"model.{tower}.vocab_size": 5}),
                            prepared_with(tokenizer))


def test_runs_that_read_alike_share_the_questions():
    """Every run of the quickstart tokenized 34,000 questions anew."""
    prepared = Prepared(None, None, None, {}, {"train": [1], "dev": [2]})
    config = Config(runs=("rag_token", "frozen"))
    made = job.Job(config, None, prepared, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job.Job, "tokenize", lambda job, examples: (job.config.data, examples))
        tokens = made.of_run("rag_token").tokens("train")
        assert made.of_run("frozen").tokens("train") is tokens
        assert made.tokens("dev") == (config.data, [2])
        shorter = replace(config, {"data.max_question_length": 8})
        other = dataclasses.replace(made, config=shorter).tokens("train")
        assert other == (shorter.data, [1]) != tokens


@pytest.mark.parametrize("other", [Example("1", "Who?", ("b",)), Example("1", "When?", ("a",)),
                                   Example("1", "Who?", ("a",), targets=("b",))])
def test_processes_that_have_read_other_questions_are_refused(monkeypatch, other):
    """Each has a file of that name on its own disk: half of the answers were those to other
    questions, and nothing was said."""
    kept, said = [Example("1", "Who?", ("a",))], []
    made = job.Job(Config(), None, Prepared(None, None, None, {}, {}), None)
    monkeypatch.setattr(job, "QuestionTokens", lambda examples, *_: examples)
    monkeypatch.setattr(hosts, "exchange", lambda value: said.append(value) or [said[0], value])
    assert made.tokenize(kept) == kept and not said, "alone"
    monkeypatch.setattr(hosts, "connected", lambda: True)
    assert made.tokenize(kept) == kept == made.tokenize(list(kept)) and len(said) == 2
    with pytest.raises(ConfigError, match="different values of the questions and answers; start"):
        made.tokenize([other])
