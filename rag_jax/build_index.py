"""`python -m rag_jax.build_index`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.run("build_index")
