"""`python -m rag_jax.compile_report`."""

from rag_jax import cli

cli.enter(__name__, __spec__.name)
