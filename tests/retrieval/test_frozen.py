"""An index of a few kilobytes, as the version before the formats had one reader wrote it."""

import pathlib
import shutil

import numpy as np

from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import Passage
from rag_jax.retrieval.versions import current

FROZEN = pathlib.Path(__file__).parent / "frozen"


def test_an_index_of_an_earlier_version_opens_and_answers(tmp_path):
    """Builds take hours: a reader that knew its own writer alone would have them made again."""
    index = PassageIndex.open(shutil.copytree(FROZEN, tmp_path / "index"), "e", verify=True)
    np.testing.assert_array_equal(index.search(np.eye(8, dtype=np.float32), 2).ids[:3],
                                  [[0, 4], [3, 1], [1, 4]])
    assert index.manifest["recall"]["recall"] == 1.0
    store = PassageStore.open(current(tmp_path / "index") / "passages")
    assert store[3] == index.passages[3] == Passage("p3", "title 3", "tall red red old tree green")
    assert [store.tokens("bert").row(row).tolist() for row in range(5)] == [
        [1, 2, row] for row in range(5)]
    assert store.row_of("p4") == 4
