"""The same comparison as test_goldens.py, live; needs torch (the [parity] extra)."""

import dataclasses
import pathlib

import numpy as np
import parity
import pytest

torch = pytest.importorskip("torch")

import reference  # noqa: E402
import transformers  # noqa: E402

from rag_jax.hub.load import load  # noqa: E402
from rag_jax.hub.save import save  # noqa: E402
from rag_jax.hub.tensors import open_tensors  # noqa: E402

CASES = reference.CASES


def exported(folder: pathlib.Path) -> pathlib.Path:
    """Our export of a checkpoint of transformers."""
    found = load(folder)
    family = "BertModel" if found.family == "BertForMaskedLM" else found.family
    save(folder / "exported", family, found.params, retriever=found.retriever,
         generator=found.generator, ids=found.ids)
    return folder / "exported"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [7])
def test_import_and_export_agree_with_transformers(name, seed, tmp_path):
    case = CASES[name]
    model = reference.build(case, seed)
    inputs = reference.make_inputs(case, seed + 1)
    model.save_pretrained(tmp_path)
    pretrained = parity.assert_same(reference.record(model, case, inputs), tmp_path)

    folder = exported(tmp_path)
    kind = "BertModel" if case.model == "BertForMaskedLM" else case.model
    again, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    theirs, ours = model.state_dict(), again.state_dict()
    for key in ours:
        if "pooler" not in key:
            source = f"bert.{key}" if kind != case.model else key
            assert torch.equal(theirs[source], ours[key]), key
    record = reference.record(again.eval(), dataclasses.replace(case, model=kind), inputs)
    assert parity.assert_same(record, folder).ids == pretrained.ids


@pytest.mark.parametrize("name", ["dpr_question", "bart_generation", "rag_sequence"])
@pytest.mark.parametrize("old", [True, False])
def test_files_of_torch_itself(name, old, tmp_path):
    """torch.save's two formats, float32 and bfloat16, tied copies included."""
    model = reference.build(CASES[name])
    model.config.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state = model.to(dtype).state_dict()
        torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
        tensors = open_tensors(tmp_path)
        assert set(tensors) == set(state)
        for key, value in state.items():
            read = tensors.read(key).astype(np.float32)
            np.testing.assert_array_equal(read, value.float().numpy(), err_msg=key)
        load(tmp_path)


def test_generation_settings_come_through(tmp_path):
    model = reference.build(CASES["bart_generation"])
    model.generation_config.forced_bos_token_id = 0
    model.generation_config.forced_eos_token_id = 2
    model.save_pretrained(tmp_path)
    ids = load(tmp_path).ids
    assert (ids.start, ids.end, ids.pad, ids.forced_bos, ids.forced_eos) == (2, 2, 1, 0, 2)
    again = transformers.BartForConditionalGeneration.from_pretrained(exported(tmp_path))
    kept = again.generation_config
    assert (kept.forced_bos_token_id, kept.forced_eos_token_id) == (0, 2)
    assert (kept.decoder_start_token_id, kept.pad_token_id, kept.eos_token_id) == (2, 1, 2)


BASE = {
    "dpr_base": reference.Case("DPRQuestionEncoder", {
        "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512}),
    "bart_base": reference.Case("BartForConditionalGeneration", {}, {
        "vocab_size": 50265, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
        "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072, "max_position_embeddings": 1024}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BASE)
def test_base_size(name, tmp_path):
    case = BASE[name]
    model = reference.build(case, scale=0.03)
    record = reference.record(model, case, reference.make_inputs(case))
    model.save_pretrained(tmp_path)
    del model
    parity.assert_same(record, tmp_path, tolerance=1e-4)
