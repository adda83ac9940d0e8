"""Our models against what transformers computed once (goldens/, written by make_goldens.py)."""

import json
import math
import pathlib

import checkpoints
import jax
import numpy as np
import parity
import pytest
import safetensors.numpy
import scipy.special
import tiny

from rag_jax.data.text import Tokenizer
from rag_jax.hub.load import load
from rag_jax.hub.save import save

GOLDENS = sorted((pathlib.Path(__file__).parent / "goldens").glob("*.npz"))
T5, RERANKERS = (sorted((pathlib.Path(__file__).parent / "goldens" / group).glob("*.npz"))
                 for group in ("t5", "rerankers"))
NAMES = [path.stem for path in GOLDENS] + [
    f"{path.parent.name}/{path.stem}" for path in (*T5, *RERANKERS)]
SENTENCES = sorted((pathlib.Path(__file__).parent / "goldens/sentences").glob("*.npz"))


def unpacked(record: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Takes what `make_goldens.packed` put into the record."""
    values, shapes = record.pop(name), json.loads(str(record.pop(f"{name}_shapes")))
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    pieces = np.split(values, ends[:-1])
    return {k: piece.reshape(shape) for (k, shape), piece in zip(shapes.items(), pieces,
                                                                 strict=True)}


def golden(name: str, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The record of a golden; its checkpoint is written to `folder`."""
    with np.load(pathlib.Path(__file__).parent / "goldens" / f"{name}.npz") as file:
        record = dict(file)
    (folder / "config.json").write_text(str(record.pop("config")))
    safetensors.numpy.save_file(unpacked(record, "weights"), folder / "model.safetensors",
                                metadata={"format": "pt"})
    gradients = unpacked(record, "gradients")
    return {**record, **{f"gradients/{k}": v for k, v in gradients.items()}}


@pytest.mark.parametrize("name", NAMES)
def test_outputs_losses_and_gradients_equal_the_reference(name, tmp_path):
    parity.assert_same(golden(name, tmp_path), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_import_export_import_is_bitwise_the_same(name, tmp_path):
    golden(name, tmp_path)
    first = load(tmp_path)
    family = first.family.replace("ForMaskedLM", "Model")
    save(tmp_path / "out", family, first.params, first)
    second = load(tmp_path / "out")
    assert jax.tree.all(jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(),
        first.params, second.params))
    assert (first.retriever, first.generator, first.ids, first.kind) == (
        second.retriever, second.generator, second.ids, second.kind)


def test_a_one_token_answer_keeps_its_document_prior(tmp_path):
    """transformers adds log p(z | x) at the second target token, so that an answer of one token
    is scored without it; ours is log sum_z p(z | x) p(y | x, z) whatever the length."""
    record = golden("rag_sequence", tmp_path)
    pretrained = load(tmp_path)
    x = {k.removeprefix("inputs/"): v for k, v in record.items() if k.startswith("inputs/")}
    first = x["target_ids"][:, 0]
    logits = record["outputs/logits"][:, 0].reshape(*x["source_ids"].shape[:2], -1)
    log_p = scipy.special.log_softmax(logits.astype(np.float64), -1)
    log_p = np.take_along_axis(log_p, first[:, None, None], -1)[..., 0]  # -> [B, K]
    prior = scipy.special.log_softmax(record["outputs/doc_scores"].astype(np.float64), -1)
    right = -scipy.special.logsumexp(prior + log_p, -1)
    without_prior = -scipy.special.logsumexp(log_p, -1)
    x["target_mask"] = np.arange(x["target_ids"].shape[1])[None] < np.ones_like(first)[:, None]
    with jax.default_matmul_precision("highest"):
        run = tiny.jit(lambda params: parity.outputs(pretrained, x, params)["loss"])
        ours = np.asarray(run(pretrained.params))
    np.testing.assert_allclose(ours, right, rtol=1e-5)
    np.testing.assert_allclose(record["outputs/one_token_loss"], without_prior, rtol=1e-5)
    assert (right - without_prior > 0.05).all(), "the two formulas must differ here"


@pytest.mark.parametrize("path", SENTENCES, ids=lambda path: path.stem)
def test_vectors_are_those_of_sentence_transformers(path, tmp_path):
    """With another pooling, or without its prompts, a MiniLM found 75 answers of 95."""
    golden, folder = np.load(path), tmp_path / "folder"
    for name in golden.files:
        if name.startswith("files/"):
            file = folder / name.removeprefix("files/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(golden[name].tobytes())
    found = load(folder)
    for name, value in parity.sentence_vectors(found).items():
        np.testing.assert_allclose(value, golden[name], rtol=0, atol=1e-5, err_msg=name)
    tokenizers = {"bert": Tokenizer.load(found.tokenizers["bert"])}
    for name, source in (("out", found), ("again", None)):
        source = source or load(tmp_path / "out")
        save(tmp_path / name, found.family, source.params, source, tokenizers=tokenizers)
        assert (source.retriever, source.longest) == (found.retriever, 24)
    written = [{file.relative_to(tmp_path / name): file.read_bytes()
                for file in (tmp_path / name).rglob("*") if file.is_file()}
               for name in ("out", "again")]
    assert written[0] == written[1]
    checkpoints.assert_equal(load(tmp_path / "out").params, found.params)


def test_the_goldens_are_small_and_cover_every_family():
    kinds = {json.loads(str(np.load(path)["config"]))["architectures"][0] for path in GOLDENS}
    assert len(kinds) == len(GOLDENS) == 19
    assert sum(path.stat().st_size for path in GOLDENS) < 450_000
    assert [path.stem for path in T5] == ["gated", "plain"]
    assert sum(path.stat().st_size for path in T5) < 60_000
    assert [path.stem for path in RERANKERS] == ["bert", "xlm_roberta"]
    assert sum(path.stat().st_size for path in RERANKERS) < 40_000
    assert len(SENTENCES) == 5
    assert sum(path.stat().st_size for path in SENTENCES) < 200_000
