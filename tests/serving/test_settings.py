"""What a server may be told."""

import pytest

from rag_jax.config import ConfigError
from rag_jax.serving.settings import Settings


@pytest.mark.parametrize("name, said", [("token", "RAG_JAX_TOKEN"),
                                        ("memory_token", "RAG_JAX_MEMORY_TOKEN")])
def test_a_token_is_one_that_every_client_can_send(name, said):
    """The page sent é as Latin-1, and the server waited for UTF-8; and a blank one was none."""
    for token in ("né", " ", "\t", " padded", "padded\n", "two\nlines"):
        with pytest.raises(ConfigError, match=f"^{said}: must be .* ASCII"):
            Settings("rag_token", **{name: token})
    for token in ("", "x", "sk-~!", "two words"):
        Settings("rag_token", **{name: token})
