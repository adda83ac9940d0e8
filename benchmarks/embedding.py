"""Embedding passages, beside torch and onnxruntime: the same random bert-base, the same token ids.

    python benchmarks/embedding.py --passages FILE.tsv [--json OUT] [--count 256] [--repeats 3]
        [--sides ours torch] [--questions]

Needs the [benchmarks] extra. Every side is a process of its own that holds its encoder; they take
turns, so that all see the same machine, and embed passages of the file (as many as --count, evenly
spread) whose tokens, by a WordPiece trained on the file, are given. Prints medians of

    ours, ours_bfloat16              what the index builder runs, with its batches; the vectors go
                                     to the disk
    torch, torch_bfloat16            transformers' DPRContextEncoder as its RAG example runs it:
                                     batches of 16 in the order of the file, padded to the
                                     longest; float32, or bfloat16 by autocast
    onnxruntime                      the same encoder exported to ONNX, the same batches, float32
    ..._sorted                       the rival, given the passages in the order of their length

--questions: a sentence encoder of the size of all-MiniLM-L6-v2 (6 layers of width 384, the mean, of
length 1), and texts as long as questions, the first 12 words of passages. Prints, in float32,

    questions                        what answers questions
    sentence_transformers            encode_query of that library, as it comes
    onnxruntime_questions            the exported encoder by length, in batches of 32

all from text to vectors, the last with our tokenizer.

--json writes {"ratios": {"torch/float32", "onnxruntime/float32", "torch/bfloat16": a rival's time
over ours of that dtype; "torch_sorted/..." and so on: of sorted input}, "passages_per_sec",
"peak_gib", "padding" and "difference" of every side, "cpu"}. Padding is the share of tokens that
are none; the difference is the largest of any coordinate from ours in float32, over the largest
coordinate.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable

import measuring
import numpy as np
from measuring import SideProcesses, cpu_name

from rag_jax import files

BATCH, LONGEST, TABLE = 16, 256, "document_encoder"
SIDES = ("ours", "ours_bfloat16", "torch", "torch_bfloat16", "onnxruntime", "torch_sorted",
         "torch_bfloat16_sorted", "onnxruntime_sorted")
QUESTION_SIDES = ("questions", "sentence_transformers", "onnxruntime_questions")
Embed = Callable[[], tuple[np.ndarray, int]]  # the vectors, and tokens computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passages", metavar="FILE", help="passages, as config.data.passages")
    parser.add_argument("--count", type=int, default=256, help="passages embedded in a turn")
    parser.add_argument("--repeats", type=int, default=3, help="timed turns of each side")
    parser.add_argument("--sides", choices=(*SIDES, *QUESTION_SIDES), nargs="+",
                        help="some sides only")
    parser.add_argument("--questions", action="store_true", help="a sentence encoder's questions")
    parser.add_argument("--json", metavar="OUT", type=pathlib.Path,
                        help="write the figures there too")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        answer_requests(options.side, options.folder)
        return
    if not options.passages:
        parser.error("--passages FILE is needed")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_store(options.passages, options.count, folder, options.questions)
        sides = options.sides or (QUESTION_SIDES if options.questions else SIDES)
        write_encoder(folder, any(side.startswith("onnx") for side in sides), options.questions)
        report = compare(folder, sides, options.repeats)
    if options.json:
        files.write_json(options.json, report)


def compare(folder: pathlib.Path, chosen: Iterable[str], repeats: int) -> dict:
    with SideProcesses(__file__, chosen, folder) as processes:
        turns = processes.take_turns("embed", repeats)
    lengths = read_rows(folder)[1]
    report: dict = {"cpu": cpu_name(), "passages": len(lengths), "tokens": int(lengths.sum()),
                    "secs": {}, "passages_per_sec": {}, "peak_gib": {}, "padding": {},
                    "difference": {}, "ratios": {}}
    vectors = {side: np.load(folder / f"{side}.npy") for side in turns}
    own = next((side for side in ("ours", "questions") if side in turns), None)
    exact = vectors[own or next(iter(vectors))]
    print(f"{report['cpu']}: {len(lengths)} passages, {lengths.mean():.0f} tokens each")
    for side, found in turns.items():
        secs = statistics.median(turn["secs"] for turn in found[1:])
        report["secs"][side] = secs
        report["passages_per_sec"][side] = len(lengths) / secs
        report["peak_gib"][side] = found[-1]["peak_gib"]
        report["padding"][side] = 1 - lengths.sum() / found[-1]["tokens"]
        report["difference"][side] = float(np.abs(vectors[side] - exact).max()
                                           / np.abs(exact).max())
        print(f"  {side:22} {len(lengths) / secs:6.1f} texts/s; first turn "
              f"{found[0]['secs']:5.1f} s, peak {found[-1]['peak_gib']:.2f} GiB, "
              f"{100 * report['padding'][side]:.0f} % padding, difference "
              f"{report['difference'][side]:.0e}")
    for side, secs in report["secs"].items():
        ours = "ours_bfloat16" if "bfloat16" in side else own
        if not side.startswith(("ours", "questions")) and ours in report["secs"]:
            dtype = "bfloat16" if "bfloat16" in side else "float32"
            name = f"{side.replace('_bfloat16', '')}/{dtype}"
            report["ratios"][name] = secs / report["secs"][ours]
            print(f"  {name}: {report['ratios'][name]:.2f} times the time of ours")
    return report


def write_store(passages: str, count: int, folder: pathlib.Path, questions: bool) -> None:
    from rag_jax.data.corpora import read_corpus
    from rag_jax.data.text import encoder_input
    from rag_jax.data.tokenizer_training import train_bert_tokenizer
    from rag_jax.hub.save import save_tokenizer
    from rag_jax.retrieval.store_writing import write_store

    found = list(read_corpus(passages))
    tokenizer = train_bert_tokenizer([text for p in found for text in (p.title, p.text)], 8192)
    chosen = found[:: max(1, len(found) // count)][:count]
    if questions:
        chosen = [p._replace(text=" ".join(p.text.split()[:12])) for p in chosen]
        texts = json.dumps([p.text for p in chosen])
        (folder / "questions.json").write_text(texts, "utf-8")
        save_tokenizer(folder / "bare", tokenizer, LONGEST)
        write_store(folder / "store", chosen, {TABLE: lambda ps: encoder_input(
            tokenizer, [p.text for p in ps], None, LONGEST)})
        return
    write_store(folder / "store", chosen, {TABLE: lambda ps: encoder_input(
        tokenizer, [p.title for p in ps], [p.text for p in ps], LONGEST)})


def write_encoder(folder: pathlib.Path, onnx: bool, questions: bool) -> None:
    """Random weights; onnxruntime's file in a process of its own, which needs much memory."""
    code = """
import sys, torch, transformers
torch.manual_seed(0)
if sys.argv[1] == "questions":
    import sentence_transformers as st
    from sentence_transformers.sentence_transformer import modules
    bare = sys.argv[2].replace("encoder", "bare")
    model = transformers.BertModel(transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536))
    model.eval().save_pretrained(bare)
    st.SentenceTransformer(modules=[modules.Transformer(bare), modules.Pooling(384, "mean"),
                                    modules.Normalize()]).save(sys.argv[2])
else:
    model = transformers.DPRContextEncoder(transformers.DPRConfig()).eval()
    model.save_pretrained(sys.argv[2])
if len(sys.argv) > 3:
    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = model
        def forward(self, ids, mask):
            found = self.encoder(ids, attention_mask=mask, return_dict=True)
            if sys.argv[1] != "questions":
                return found.pooler_output
            kept = mask[:, :, None].float()
            mean = (found.last_hidden_state * kept).sum(1) / kept.sum(1)
            return torch.nn.functional.normalize(mean, dim=1)
    axes = {0: "rows", 1: "tokens"}
    ids = torch.ones(2, 9, dtype=torch.long)
    torch.onnx.export(Pooled(), (ids, ids), sys.argv[3], input_names=["ids", "mask"],
                      output_names=["vectors"], dynamo=False,
                      dynamic_axes={"ids": axes, "mask": axes, "vectors": {0: "rows"}})
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code,
                    "questions" if questions else "passages", folder / "encoder",
                    *([folder / "encoder.onnx"] if onnx else [])], check=True)


def read_rows(folder: pathlib.Path) -> tuple[list[np.ndarray], np.ndarray]:
    """The token ids of all passages, and how many they are, int[N]."""
    from rag_jax.retrieval.passages import PassageStore

    table = PassageStore.open(folder / "store").tokens(TABLE)
    return [table.row(row).astype(np.int64) for row in range(len(table.lengths))], table.lengths


def answer_requests(side: str, folder: pathlib.Path) -> None:
    name = side.partition("_")[0]
    make = {"ours": ours, "torch": with_torch, "onnxruntime": with_onnxruntime,
            "questions": our_questions, "sentence": with_sentence_transformers}[name]
    dtype = "bfloat16" if "bfloat16" in side else "float32"
    embed = make(folder, dtype)
    if name in ("torch", "onnxruntime"):
        asked = side.endswith("questions")
        embed = in_batches(embed, folder, asked or side.endswith("sorted"), 32 if asked else BATCH)

    def save(result: tuple[np.ndarray, int]) -> dict[str, int]:
        vectors, tokens = result
        np.save(folder / f"{side}.npy", vectors)
        return {"tokens": tokens}

    measuring.answer_requests(lambda _: embed(), save)


def in_batches(embed: Callable[[np.ndarray, np.ndarray], np.ndarray], folder: pathlib.Path,
               by_length: bool, batch: int) -> Embed:
    """Batches padded to their longest, as transformers' tokenizers make them."""
    from rag_jax.data.padding import pad_rows

    stored, asked = read_rows(folder)[0], (folder / "questions.json").exists()
    tokenized = tokenize_questions(folder)[0] if asked else lambda: stored

    def run() -> tuple[np.ndarray, int]:
        rows, parts, tokens = tokenized(), [], 0
        lengths = np.array([len(row) for row in rows])
        order = np.argsort(-lengths, kind="stable") if by_length else np.arange(len(rows))
        for first in range(0, len(rows), batch):
            some = order[first : first + batch]
            ids, mask = pad_rows([rows[row] for row in some], int(lengths[some].max()), 0)
            parts.append(embed(ids.astype(np.int64), mask.astype(np.int64)))
            tokens += ids.size
        return np.concatenate(parts)[np.argsort(order)], tokens

    return run


def with_torch(folder: pathlib.Path, dtype: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    import torch
    import transformers

    model = transformers.DPRContextEncoder.from_pretrained(folder / "encoder").eval()

    def embed(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            found = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask),
                          return_dict=True)
        return found.pooler_output.float().numpy()

    return embed


def with_onnxruntime(folder: pathlib.Path, dtype: str
                     ) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    import onnxruntime

    del dtype  # float32
    session = onnxruntime.InferenceSession(folder / "encoder.onnx",
                                           providers=["CPUExecutionProvider"])
    return lambda ids, mask: session.run(None, {"ids": ids, "mask": mask})[0]


def with_sentence_transformers(folder: pathlib.Path, dtype: str) -> Embed:
    import sentence_transformers

    del dtype  # float32
    model = sentence_transformers.SentenceTransformer(str(folder / "encoder"), device="cpu")
    texts = json.loads((folder / "questions.json").read_text("utf-8"))
    tokens = int(read_rows(folder)[1].sum())  # it does not say how many it pads
    return lambda: (model.encode_query(texts), tokens)


def tokenize_questions(folder: pathlib.Path) -> tuple[Callable[[], list[list[int]]], int]:
    """What makes tokens of the questions, and the token that pads them."""
    from rag_jax.data.text import Tokenizer, encoder_input

    tokenizer = Tokenizer.load(folder / "encoder")
    texts = json.loads((folder / "questions.json").read_text("utf-8"))
    return lambda: encoder_input(tokenizer, texts, None, LONGEST), tokenizer.pad


def our_questions(folder: pathlib.Path, dtype: str) -> Embed:
    import jax

    from rag_jax import parallel
    from rag_jax.answering import Answerer, Settings
    from rag_jax.config import Config, MeshConfig
    from rag_jax.data.padding import pad_rows
    from rag_jax.decoding.settings import Decoding
    from rag_jax.hub.load import load
    from rag_jax.models.rag import RagModel

    found, config = load(folder / "encoder", retriever={"dtype": dtype}), Config()
    model = RagModel(found.retriever, config.model.generator, "token", 2, 2, 1)
    answerer = Answerer(model, parallel.make_mesh(MeshConfig(), jax.devices()[:1]), None, Settings(
        0, config.eval.batch_size, config.data.length_step, Decoding()))
    tokenized, pad = tokenize_questions(folder)
    longest, embed, shapes = config.data.max_question_length, answerer._embed, []

    def counted(params: dict, ids: jax.Array, mask: jax.Array) -> jax.Array:
        shapes.append(ids.size)
        return embed(params, ids, mask)

    answerer._embed = counted

    def run() -> tuple[np.ndarray, int]:
        shapes.clear()
        vectors = answerer.embed(found.params["bert"], *pad_rows(tokenized(), longest, pad))
        return vectors, sum(shapes)

    return run


def ours(folder: pathlib.Path, dtype: str) -> Embed:
    import jax

    from rag_jax import parallel, process
    from rag_jax.config import Config, MeshConfig
    from rag_jax.hub.load import load
    from rag_jax.models.rag import RagModel
    from rag_jax.retrieval.passages import PassageStore
    from rag_jax.retrieval.protocol import ALONE
    from rag_jax.retrieval.shards import PassageEmbedder, embed_all
    from rag_jax.training.indexing import batch_shapes, embed_passages

    process.keep_memory()
    found = load(folder / "encoder", retriever={"dtype": dtype})
    model = RagModel(found.retriever, Config().model.generator, "token", 2, 2, 1)
    mesh = parallel.make_mesh(MeshConfig(), jax.devices()[:1])
    batch_size, lengths = batch_shapes(Config(), mesh)
    embed = embed_passages(model, found.params["document_encoder"], mesh)
    store, shapes, turns = PassageStore.open(folder / "store"), [], []

    def counted(ids: np.ndarray, mask: np.ndarray) -> jax.Array:
        shapes.append(ids.size)
        return embed(ids, mask)

    embedder = PassageEmbedder(counted, TABLE, "random", LONGEST, batch_size, lengths)

    def run() -> tuple[np.ndarray, int]:
        shapes.clear()
        turns.append(1)
        content = folder / f"{dtype}-{len(turns)}" / "content"
        content.mkdir(parents=True)
        embed_all(store, embedder, content / "embeddings", ALONE)
        return np.fromfile(content / "embeddings", "<f4").reshape(len(store), -1), sum(shapes)

    return run


if __name__ == "__main__":
    main()
