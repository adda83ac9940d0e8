"""`python -m rag_jax.reproduce`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.run("reproduce")
