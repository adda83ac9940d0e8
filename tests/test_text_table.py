"""Tables as text read well."""

import numpy as np
import pytest

from rag_jax.text_table import print_table


def test_table_aligns_numbers_right_and_text_left():
    table = print_table(
        [["RAG-Token", 81.234, 3], ["closed-book", np.float32(4), None]], ["model", "EM", "n"]
    )
    assert table.splitlines() == [
        "model           EM  n",
        "-----------  -----  -",
        "RAG-Token    81.23  3",
        "closed-book   4.00",
    ]
    small = print_table([[0.0, 0.01, 0.0034, -3.4e-5]], ["a", "b", "c", "d"])
    assert small.splitlines()[-1].split() == ["0.00", "0.01", "0.0034", "-3.4e-05"]
    assert print_table([], ["a", "bc"]) == "a  bc\n-  --"
    wide = print_table([["東京", "Tōkyo\u0304"], ["a", "b"]], ["c", "d"])
    assert wide.splitlines() == ["c     d", "----  -----", "東京  Tōkyo\u0304", "a     b"]
    with pytest.raises(ValueError, match="1 cells for 2 headers"):
        print_table([["x"]], ["a", "b"])
