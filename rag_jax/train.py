"""`python -m rag_jax.train`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.run("train")
