"""A file is replaced as a whole or not at all."""

import pytest

from rag_jax import files


def test_an_error_while_writing_keeps_the_old_content(tmp_path):
    path = tmp_path / "answers.jsonl"
    files.write_text(path, "old\n")
    with pytest.raises(KeyError), files.replaced(path) as file:
        file.write("half of the n")
        raise KeyError
    assert path.read_text("utf-8") == "old\n"
    files.write_text(path, "São Tomé\n")
    assert path.read_text("utf-8") == "São Tomé\n"
    assert list(tmp_path.iterdir()) == [path]
