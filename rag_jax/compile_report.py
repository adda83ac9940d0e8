"""`python -m rag_jax.compile_report`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.run("compile_report")
