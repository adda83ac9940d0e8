"""`python -m rag_jax.serve`."""

from rag_jax import cli

cli.enter(__name__, __spec__.name)
