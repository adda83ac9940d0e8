"""What this machine's accelerator does with the training step, decoding and the device index.

    python benchmarks/accelerator.py [--size full|tiny] [--minutes 8] [--json FILE]

One command for a rented GPU or TPU: bert-base and bart-large in bfloat16 with random weights, on
all devices. On a CPU it falls back to tiny towers, which tests the command and measures nothing
of interest. Every part that still has time runs, and one table is printed and saved:

    check    what the kernels of this device compute beside plain products: the relative difference
             of attention and its gradients in bfloat16, and whether the index on the devices finds
             what numpy does, for rows that bfloat16 holds exactly
    peak     XLA's bfloat16 product of two matrices and a copy in memory, beside the chip's data
    train    one step of RAG-Token, 5 passages, inputs and targets packed as in training: useful
             share of the peak, that is operations for tokens that are no padding and nothing twice;
             with the first of remat none, dots, narrow and full that fits
    decode   greedy answers of 32 tokens; with torch on CUDA beside transformers, padded to 300
             tokens as its retriever does, in bfloat16, before the others
    search   exact search of the index on the devices: bytes of the rows by the memory's bandwidth

The programs are those that `rag_jax.compile_report` compiles, with numbers drawn for what they are
given: lengths as on Natural Questions (sources of 145 tokens on average in 256). Layers are a scan
but in the training step on a GPU, which would copy what a scan keeps a fifth of its time.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rag_jax import files, parallel, process
from rag_jax.aot import programs
from rag_jax.aot.chips import CHIPS
from rag_jax.aot.programs import Program
from rag_jax.config import BART_PRESETS, BERT_PRESETS, BartConfig, BertConfig, Config, ModelConfig
from rag_jax.config.overrides import replace
from rag_jax.data import packed
from rag_jax.data.batches import input_places
from rag_jax.data.packed import Groups
from rag_jax.models import fused_attention
from rag_jax.models.attention import Attention
from rag_jax.models.packing import Packing
from rag_jax.types import Batch

K, TARGETS, PADDED = 5, 32, 300
LENGTHS = {"question": (8, 20), "source": (90, 200), "target": (4, 12)}  # tokens, least and most
PLACES = ("source_places", "target_places")
SIZES = {  # questions of a step and of an answer, passages of the index, side of a matrix
    "full": {"train": 64, "decode": 16, "passages": 4_000_000, "matrix": 8192},
    "tiny": {"train": 8, "decode": 8, "passages": 2_000, "matrix": 256},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, help="default: tiny on a CPU, else full")
    parser.add_argument("--minutes", type=float, default=8, help="no part begins after these")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path,
                        help="write the figures there too")
    parser.add_argument("--rival", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rival:
        print(json.dumps(transformers_decode(SIZES["full"]["decode"])))
        return
    report = measure(options.size, 60 * options.minutes)
    if options.json:
        files.write_json(options.json, report)


def measure(size: str | None, secs: float) -> dict[str, Any]:
    """All parts, each printed when it is done; what ran out of time or memory says so."""
    began = time.monotonic()
    rival = beside(began + secs)  # first, as JAX keeps a GPU's memory to itself
    process.keep_memory()
    process.take_library_products()
    device = jax.devices()[0]
    size = size or ("tiny" if device.platform == "cpu" else "full")
    report = {"device": device.device_kind, "devices": jax.device_count(), "size": size,
              "jax": jax.__version__}
    print(", ".join(f"{name} {value}" for name, value in report.items()), flush=True)
    parts = {"check": check, "peak": peak, "train": train, "decode": decode, "search": search}
    for name, part in parts.items():
        try:
            late = time.monotonic() - began > secs
            report[name] = {"problem": "no time"} if late else part(size, report)
        except jax.errors.JaxRuntimeError as error:
            report[name] = {"problem": str(error).splitlines()[0]}
        if name == "decode" and rival is not None:
            report[name]["transformers"] = rival
        print(name)
        for key, value in report[name].items():
            print(f"    {key:24} {value:.4g}" if isinstance(value, float) else
                  f"    {key:24} {value}", flush=True)
    return report


def median_secs(call: Callable[[], Any], times: int = 5) -> float:
    """The median after one call that is not counted."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def check(size: str, report: dict) -> dict[str, Any]:
    """The kernel of attention, told a mask and told the lengths of packed inputs; a search."""
    del report
    rng = np.random.default_rng(0)
    rows, length, heads, width = (64, 256, 16, 1024) if size == "full" else (4, 64, 2, 128)
    mask = np.arange(length) < rng.integers(1, length, (rows, 1), endpoint=True)
    packing = Packing.of(packed.token_places(mask.reshape(1, -1), int(mask.sum())), rows, length)
    tokens, weight = (jnp.asarray(rng.normal(size=(1, mask.sum(), width)), dtype)
                      for dtype in (jnp.bfloat16, jnp.float32))
    module = Attention(heads, width, dtype=jnp.bfloat16, init_std=width**-0.5)
    at = mask[:, None, None]
    params = module.init(jax.random.key(0), tokens, tokens, at, True, None, packing)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def run(fused: bool, told: str, *arrays: Any) -> Any:
        """The gradient of the tokens, and what they get. A constant of the program would be
        computed with for minutes while it compiles."""
        def value(x: jax.Array, params: Any, packing: Packing, at: jax.Array, weight: jax.Array
                  ) -> tuple[jax.Array, jax.Array]:
            x, of_both = (x, packing) if told == "lengths" else (packing.pad(x), None)
            y = module.clone(fused=fused).apply(params, x, x, at, True, None, of_both)
            y = y if told == "lengths" else packing.pack(y)
            return (weight * y).sum(), y

        return jax.grad(value, has_aux=True)(*arrays)

    def difference(told: str) -> float:
        pairs = zip(*(run(fused, told, tokens, params, packing, at, weight)
                      for fused in (True, False)), strict=True)
        return np.max([float(jnp.linalg.norm((a - b).astype(jnp.float32).ravel())
                             / jnp.linalg.norm(b.astype(jnp.float32).ravel())) for a, b in pairs])

    return {"attention_kernel": jax.default_backend() in fused_attention.KERNELS,
            "attention_told_a_mask": difference("mask"),
            "attention_told_lengths": difference("lengths"),
            "searches_as_numpy": _searches_as_numpy(size)}


def _searches_as_numpy(size: str) -> float:
    """The share of queries whose passages are those of numpy, over rows that bfloat16 holds."""
    rng, config = np.random.default_rng(0), configuration(size, **{
        "train.batch_size": 64, "retrieval.where": "device"})
    one = program("search", config, 20_000 * jax.device_count())
    tables, queries = drawn(one.arguments)
    rows, asked = (rng.integers(-8, 9, array.shape).astype(np.float32)
                   for array in (tables.embeddings, queries))
    found = one.jitted(tables._replace(embeddings=jax.device_put(
        rows.astype(tables.embeddings.dtype), tables.embeddings.sharding)),
        jax.device_put(asked, queries.sharding))
    expected = np.argsort(-(asked @ rows.T), axis=1, kind="stable")[:, :K]
    return float((np.asarray(found.ids) == expected).all(axis=1).mean())


def peak(size: str, report: dict) -> dict[str, Any]:
    """Of one device: operations and bytes per second, measured and as its maker says."""
    side = SIZES[size]["matrix"]
    a = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    chain = jax.jit(lambda a: jax.lax.fori_loop(0, 8, lambda _, x: x @ a, a))
    numbers = [jnp.zeros(4 * side * side, jnp.float32)]
    add = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, x: x + 1, x), donate_argnums=0)

    def copies() -> jax.Array:
        numbers.append(add(numbers.pop()))
        return numbers[0]

    found = {"tflops": 8 * 2 * side**3 / median_secs(lambda: chain(a)) / 1e12,
             "gb_per_sec": 8 * 2 * numbers[0].nbytes / median_secs(copies) / 1e9}
    if chip := CHIPS.get(report["device"]):
        found |= {"tflops_of_chip": chip.peak / 1e12, "gb_per_sec_of_chip": chip.bandwidth / 1e9}
    return found


def configuration(size: str, **changes: Any) -> Config:
    """RAG-Token of bert-base and bart-large, or of tiny towers, for inputs of LENGTHS."""
    towers = {"full": ("bert-base", "bart-large"), "tiny": ("tiny", "tiny")}[size]
    how = {"dtype": "bfloat16", "scan_layers": True}
    retriever = dataclasses.replace(BERT_PRESETS[towers[0]], **how)
    generator = dataclasses.replace(BART_PRESETS[towers[1]], **how)
    config = Config(runs=("rag_token",), model=ModelConfig(
        retriever=dataclasses.replace(retriever, vocab_size=retriever.vocab_size or 512),
        generator=dataclasses.replace(generator, vocab_size=generator.vocab_size or 512)))
    return replace(config, {"retrieval.k": K, "data.max_question_length": 32,
                            "data.max_source_length": 256, "data.max_target_length": 16,
                            "train.optimizer.accumulate": 1, **changes})


def program(kind: str, config: Config, passages: int = 0) -> Program:
    mesh = parallel.make_mesh(config.mesh)
    return next(programs.programs(config, mesh, passages=passages, kinds=[kind]))


def drawn(tree: Any, deviation: float = 0.02) -> Any:
    """Arrays of these shapes in their shardings: normal numbers, True, and 0."""
    leaves, structure = jax.tree.flatten(tree)
    makers = {leaf: _maker(leaf, deviation) for leaf in leaves}  # alike are compiled once
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(
        structure, [makers[leaf](key) for leaf, key in zip(leaves, keys, strict=True)])


def _maker(leaf: jax.ShapeDtypeStruct, deviation: float) -> Callable[[jax.Array], jax.Array]:
    def make(key: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.full(leaf.shape, leaf.dtype == bool, leaf.dtype)
        return (deviation * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)

    return jax.jit(make, out_shardings=leaf.sharding)


def questions(abstract: Batch, vocab: int) -> Batch:
    """A batch of these shapes with random tokens and LENGTHS, on the host."""
    rng, fields = np.random.default_rng(0), {}
    for name, leaf in abstract._asdict().items():
        if leaf is None:
            continue
        tower = {"decoder": "question"}.get(name.split("_")[0], name.split("_")[0])
        if name.endswith("_mask") and tower in LENGTHS:
            lengths = rng.integers(*LENGTHS[tower], leaf.shape[:-1], endpoint=True)
            fields[name] = np.arange(leaf.shape[-1]) < lengths[..., None]
        elif leaf.dtype == bool or name == "weight":
            fields[name] = np.ones(leaf.shape, leaf.dtype)
        elif jnp.issubdtype(leaf.dtype, jnp.integer):
            fields[name] = rng.integers(5, vocab, leaf.shape).astype(leaf.dtype)
        else:
            fields[name] = rng.normal(size=leaf.shape).astype(leaf.dtype)
    return abstract._replace(**fields)


def with_places(batch: Batch, config: Config) -> Batch:
    """With the places of the tokens of inputs and targets, as `RagBatcher` and `QuestionTokens`
    pack them."""
    groups, tokens = Groups(jax.device_count()), batch.target_mask.sum(axis=1)
    _, sources = input_places(batch.source_mask.sum(axis=-1), groups, config.data.length_step,
                              batch.source_mask.shape[-1])
    room = packed.room(tokens, len(tokens) // groups.count)
    return batch._replace(source_places=sources,
                          target_places=packed.places(batch.target_mask, groups, room))


def useful_flops(retriever: BertConfig, generator: BartConfig, batch: Batch) -> float:
    """Matrix products of a training step for tokens that are no padding: forward, and twice that
    backward. A question's decoder runs once for each of its passages."""
    question = batch.question_mask.sum(axis=-1)
    source = batch.source_mask.sum(axis=-1)
    target = batch.target_mask.sum(axis=-1, keepdims=True) + 0 * source

    def layer(tokens: np.ndarray, others: np.ndarray, width: int, hidden: int) -> float:
        """A block that projects its own tokens and attends to others."""
        return float((tokens * (8 * width**2 + 4 * width * hidden)
                      + tokens * others * 4 * width).sum())

    r, g = retriever, generator
    cross = (4 * g.width**2 * (target + source) + 4 * g.width * target * source).sum()
    forward = (r.layers * layer(question, question, r.width, r.mlp_width)
               + g.encoder_layers * layer(source, source, g.width, g.mlp_width)
               + g.decoder_layers * (layer(target, target / 2, g.width, g.decoder_sizes[1]) + cross)
               + float(target.sum()) * 2 * g.width * g.vocab_size)
    return 3 * float(forward)


def train(size: str, report: dict) -> dict[str, Any]:
    rows = SIZES[size]["train"] * jax.device_count()
    scan = jax.devices()[0].platform != "gpu"
    for remat in ("none", "dots", "narrow", "full"):
        config = configuration(size, **{"train.batch_size": rows} | {
            f"model.{tower}.{name}": value for tower in ("generator", "retriever")
            for name, value in (("remat", remat), ("scan_layers", scan))})
        try:
            found = one_step(config)
            break
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or remat == "full":
                raise
            print(f"    remat={remat} does not fit", flush=True)
    rate = found["useful_tflop"] / found["secs"] / jax.device_count()
    shares = {name: rate / report["peak"][tflops] for name, tflops in (
        ("useful_mfu_measured", "tflops"), ("useful_mfu_of_chip", "tflops_of_chip"))
        if tflops in report["peak"]}
    return {"remat": remat, "questions": rows, "passages": K, **found, **shares}


def one_step(config: Config) -> dict[str, Any]:
    began = time.perf_counter()
    one = program("train", config)
    state, batch, number = one.arguments
    host = with_places(questions(batch, config.model.retriever.vocab_size), config)
    places = {name: jax.ShapeDtypeStruct(getattr(host, name).shape, np.int32,
                                         sharding=batch.weight.sharding) for name in PLACES}
    batch = batch._replace(**places)
    compiled = one.jitted.lower(state, batch, number).compile()
    compile_secs = time.perf_counter() - began
    given = jax.device_put(host, jax.tree.map(lambda leaf: leaf.sharding, batch))
    number = parallel.put_number(1, number.sharding)
    held = [type(state)(drawn(state.params), jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        state.opt_state))]

    def step() -> Any:
        state, metrics = compiled(held.pop(), given, number)  # the step takes its state over
        held.append(state)
        return metrics

    secs = median_secs(step)
    flops = useful_flops(config.model.retriever, config.model.generator, host)
    return {"secs": secs, "useful_tflop": flops / 1e12, "compile_secs": compile_secs,
            "padding": 1 - float(host.source_mask.sum()) / host.source_places.size}


def decode(size: str, report: dict) -> dict[str, Any]:
    del report
    rows = SIZES[size]["decode"] * jax.device_count()
    one = program("decode", configuration(size, **{
        "eval.batch_size": rows, "eval.min_length": TARGETS, "data.max_target_length": TARGETS}))
    params, batch, _ = one.arguments
    given = jax.device_put(questions(batch, 512), jax.tree.map(lambda leaf: leaf.sharding, batch))
    params = drawn(params)
    secs = median_secs(lambda: one.jitted(params, given, None))
    return {"questions": rows, "secs": secs, "tokens_per_sec": rows * TARGETS / secs}


def search(size: str, report: dict) -> dict[str, Any]:
    passages, found = SIZES[size]["passages"] * jax.device_count(), {}
    for batch in (1, 64):
        one = program("search", configuration(size, **{
            "train.batch_size": batch, "retrieval.where": "device"}), passages)
        tables, queries = drawn(one.arguments, 1.0)
        secs = median_secs(lambda: one.jitted(tables, queries))  # noqa: B023
        rate = tables.embeddings.nbytes / secs / 1e9 / jax.device_count()
        found |= {f"batch_{batch}_secs": secs, f"batch_{batch}_gb_per_sec": rate,
                  f"batch_{batch}_of_bandwidth": rate / report["peak"]["gb_per_sec"]}
    return {"passages": passages, **found}


def beside(end: float) -> dict[str, Any] | None:
    """transformers' figures, in a process of its own; None without torch on CUDA, or no time."""
    check = "import torch, transformers; assert torch.cuda.is_available()"
    if subprocess.run([sys.executable, "-c", check], capture_output=True, check=False).returncode:
        return None
    try:
        done = subprocess.run([sys.executable, __file__, "--rival"], capture_output=True, text=True,
                              check=True, timeout=max(1.0, (end - time.monotonic()) / 3))
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return {"problem": str(error)}
    return json.loads(done.stdout.splitlines()[-1])


def transformers_decode(rows: int) -> dict[str, Any]:
    """Greedy answers of transformers' RagTokenForGeneration on one GPU, random weights."""
    import torch
    import transformers

    large = {"d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 4096,
             "decoder_ffn_dim": 4096, "encoder_attention_heads": 16, "decoder_attention_heads": 16}
    config = transformers.RagConfig.from_question_encoder_generator_configs(
        transformers.DPRConfig(), transformers.BartConfig(**large), n_docs=K)
    model = transformers.RagTokenForGeneration(config).to("cuda", torch.bfloat16).eval()
    model.generator.generation_config.forced_eos_token_id = None
    ids = torch.randint(5, 50_000, (rows * K, PADDED), device="cuda")
    mask = torch.arange(PADDED, device="cuda") < torch.randint(
        *LENGTHS["source"], (rows * K, 1), device="cuda")
    scores = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
    secs = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.no_grad():
            model.generate(context_input_ids=ids, context_attention_mask=mask.long(),
                           doc_scores=scores, n_docs=K, num_beams=1, do_sample=False,
                           max_length=TARGETS + 1, min_length=TARGETS + 1)
        torch.cuda.synchronize()
        secs.append(time.perf_counter() - began)
    taken = statistics.median(secs[1:])
    return {"questions": rows, "secs": taken, "tokens_per_sec": rows * TARGETS / taken}


if __name__ == "__main__":
    main()
