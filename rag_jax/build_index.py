"""`python -m rag_jax.build_index`; imported, this module is the function `rag_jax.build_index`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.run("build_index")
elif __name__ == "rag_jax.build_index":
    import sys

    from rag_jax.api import build_index

    sys.modules[__name__] = build_index
