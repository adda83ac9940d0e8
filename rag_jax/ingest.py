"""`python -m rag_jax.ingest`; imported, this module is the function `rag_jax.ingest`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.run("ingest")
elif __name__ == "rag_jax.ingest":
    import sys

    from rag_jax.ingestion import ingest

    sys.modules[__name__] = ingest
