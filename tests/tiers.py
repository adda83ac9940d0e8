"""Which test files are long; all others are `-m quick`."""

import pathlib

# Files and folders that compile or train, longest first: with -n they begin first, so that nobody
# waits for one at the end, nor at the start for what another worker trains. Tests of all others are
# `quick`.
LONG = (
    "end_to_end/test_reduced_quickstart.py", "end_to_end/test_resume.py", "end_to_end",
    "test_parallel.py", "decoding/test_answer.py", "campaigns", "hub", "models",
    "training/test_on_device.py", "training/test_pretrained.py", "training/test_collapse.py",
    "training/test_checkpoint_damage.py", "training/test_loop.py", "training/test_stages.py",
    "training/test_step.py", "training/test_checkpoint.py", "training/test_refresh.py",
    "training/test_verifying.py", "training/test_sources.py", "training/test_reranker.py", "aot",
    "decoding/test_sampling.py",
    "config/test_table_configs.py", "config/test_whole_configs.py", "test_answering.py",
    "test_evaluation.py", "test_evaluation_null.py", "test_ingestion.py", "cli/test_generate.py",
    "test_api.py",
    "test_heatmap.py", "test_conversion.py", "test_docs.py", "test_wheel.py", "test_marginal.py",
    "test_scoring.py",
    "decoding", "retrieval/test_build.py", "retrieval/test_device.py", "retrieval/test_scann.py",
    "retrieval/test_bm25.py", "retrieval/test_verification.py", "reproduction/test_experiments.py",
    "reproduction/test_lab.py", "reproduction/test_hot_swap.py", "tpu_scripts",
    "data/test_damaged_files.py", "data/test_prepare.py", "serving/test_app.py",
    "serving/test_clients.py",
)
TESTS = pathlib.Path(__file__).parent


def place_in_long(file: pathlib.Path) -> int:
    """The place of a file, or of its folder, in LONG; LONG's length for another."""
    name = file.relative_to(TESTS)
    places = [LONG.index(str(part)) for part in (name, *name.parents) if str(part) in LONG]
    return min(places, default=len(LONG))


def is_quick(file: pathlib.Path) -> bool:
    return place_in_long(file) == len(LONG)
