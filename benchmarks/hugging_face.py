"""A full-size RAG of transformers, brought here and asked the same question by both.

    python benchmarks/hugging_face.py [--small] [--folder DIR]

Needs the [parity] extra (torch). Writes a RagTokenForGeneration of bert-base and bart-large with
random weights, converts it with rag_jax.convert, and answers one question over the same five
passages (random tokens) with both; every part runs in a process of its own, whose time and peak
memory are printed, beside the parameters' bytes and how far the two agree.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
from measuring import BART_BASE, peak_gib

PASSAGES, SOURCE, LENGTH = 5, 160, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="where the checkpoints are written (default: temporary)")
    parser.add_argument("--small", action="store_true", help="bart-base instead of bart-large")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        began = time.monotonic()
        result = PARTS[options.part](pathlib.Path(options.folder), options.small)
        print(json.dumps({"secs": time.monotonic() - began, "peak_gib": peak_gib(children=True),
                          **(result or {})}))
        return
    with tempfile.TemporaryDirectory() as temporary:
        compare(options.folder or temporary, options.small)


def compare(folder: str, small: bool) -> None:
    found = {}
    for part in PARTS:
        command = [sys.executable, __file__, "--part", part, "--folder", folder]
        done = subprocess.run(command + ["--small"] * small, stdout=subprocess.PIPE, check=True)
        found[part] = json.loads(done.stdout.decode().splitlines()[-1])
    size = found["write"].pop("gib")
    print(f"parameters: {size:.2f} GiB")
    for part, values in found.items():
        answering = f"   answering {values['answer_secs']:.2f} s" if "answer_secs" in values else ""
        print(f"{part:8} {values['secs']:7.1f} s   peak {values['peak_gib']:5.2f} GiB = "
              f"{values['peak_gib'] / size:.2f} x parameters{answering}")
    ours, theirs = (np.load(pathlib.Path(folder) / f"{name}.npz") for name in ("ours", "theirs"))
    print(f"answer tokens: ours {ours['tokens'].tolist()}, theirs {theirs['tokens'].tolist()}")
    for name in ("doc_scores", "loss"):
        scale = max(1.0, np.abs(theirs[name]).max())
        print(f"{name}: largest relative difference "
              f"{np.abs(ours[name] - theirs[name]).max() / scale:.1e}")


def inputs(vocab: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "question": rng.integers(1000, 20000, (1, 12)),
        "source": rng.integers(5, vocab, (1, PASSAGES, SOURCE)),
        "target": np.append(rng.integers(5, vocab, 7), 2)[None],
        "embeddings": rng.normal(size=(1, PASSAGES, width)).astype(np.float32),
    }


def write(folder: pathlib.Path, small: bool) -> dict[str, float]:
    import torch
    import transformers

    torch.manual_seed(0)
    large = {} if small else {"d_model": 1024, "encoder_layers": 12, "decoder_layers": 12}
    config = transformers.RagConfig.from_question_encoder_generator_configs(
        transformers.DPRConfig(), transformers.BartConfig(
            **(BART_BASE if small else large), init_std=0.06),  # answers then have several tokens
        n_docs=PASSAGES)
    model = transformers.RagTokenForGeneration(config)
    model.save_pretrained(folder / "hugging_face")
    return {"gib": sum(p.numel() for p in model.parameters()) * 4 / 2**30}


def theirs(folder: pathlib.Path, small: bool) -> dict[str, float]:
    import torch
    import transformers

    model = transformers.RagTokenForGeneration.from_pretrained(folder / "hugging_face").eval()
    model.generation_config.forced_eos_token_id = None
    x = {k: torch.from_numpy(v) for k, v in inputs(
        model.config.generator.vocab_size, model.config.question_encoder.hidden_size).items()}
    with torch.no_grad():
        query = model.rag.question_encoder(x["question"])[0]
        doc_scores = torch.einsum("be,bke->bk", query, x["embeddings"])
        given = {"context_input_ids": x["source"].flatten(0, 1), "doc_scores": doc_scores,
                 "context_attention_mask": torch.ones_like(x["source"].flatten(0, 1)),
                 "n_docs": PASSAGES}
        labels = torch.cat([torch.full_like(x["target"][:, :1], 2), x["target"]], 1)
        loss = model(**given, labels=labels).loss
        began = time.monotonic()
        tokens = model.generate(**given, num_beams=1, do_sample=False, max_length=LENGTH + 1)
        secs = time.monotonic() - began
    np.savez(folder / "theirs.npz", tokens=tokens[0, 1:], loss=loss, doc_scores=doc_scores)
    return {"answer_secs": secs}


def convert(folder: pathlib.Path, small: bool) -> None:
    subprocess.run([sys.executable, "-m", "rag_jax.convert", "--from", folder / "hugging_face",
                    "--to", folder / "workdir"], check=True)


def export(folder: pathlib.Path, small: bool) -> None:
    subprocess.run([sys.executable, "-m", "rag_jax.convert", "--from", folder / "workdir",
                    "--to", folder / "exported"], check=True)


def ours(folder: pathlib.Path, small: bool) -> dict[str, float]:
    import jax

    from rag_jax.decoding.answer import decode
    from rag_jax.decoding.settings import Decoding
    from rag_jax.hub.load import load
    from rag_jax.models import rag
    from rag_jax.models.likelihood import log_likelihood
    from rag_jax.types import Batch

    found = load(folder / "hugging_face")
    model = rag.RagModel(found.retriever, found.generator, "token", 2, 2, 1)
    x = {k: v.astype(np.int32) if v.dtype == np.int64 else v for k, v in inputs(
        found.generator.vocab_size, model.embedding_width).items()}
    batch = Batch(
        x["question"], np.ones_like(x["question"], bool), x["source"],
        np.ones_like(x["source"], bool), x["embeddings"], np.ones((1, PASSAGES), bool),
        x["target"], np.ones_like(x["target"], bool), np.ones(1, np.float32))
    likelihood = jax.jit(lambda params, batch: log_likelihood(model, params, batch)["log_p"])
    run = jax.jit(lambda params, batch: decode(
        model, Decoding(max_length=LENGTH), params, batch).best.tokens)
    queries = rag.embed(model, found.params["query_encoder"], batch.question_ids,
                        batch.question_mask)
    jax.block_until_ready(run(found.params, batch))  # compiled before it is timed
    began = time.monotonic()
    tokens = np.asarray(run(found.params, batch))[0]
    secs = time.monotonic() - began
    np.savez(folder / "ours.npz", tokens=tokens, loss=-np.asarray(likelihood(found.params, batch)),
             doc_scores=np.einsum("BE,BKE->BK", queries, x["embeddings"]))
    return {"answer_secs": secs}


PARTS = {"write": write, "convert": convert, "export": export, "theirs": theirs, "ours": ours}

if __name__ == "__main__":
    main()
