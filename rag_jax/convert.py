"""`python -m rag_jax.convert`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.run("convert")
