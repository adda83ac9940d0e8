"""`python -m rag_jax.ingest`; imported, this module is the function `rag_jax.ingest`."""

from rag_jax import cli

cli.enter(__name__, __spec__.name)
