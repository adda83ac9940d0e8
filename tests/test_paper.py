"""The paper's numbers: sums that must hold, and cells that its errors concern."""

from rag_jax import paper


def test_columns_of_the_human_evaluation_sum_to_100():
    """v4 prints 11.8 where only 18.8 makes the column whole."""
    for column in ("factuality", "specificity"):
        assert abs(sum(row[column] for row in paper.TABLE4.values()) - 100) < 1e-9
    assert any("11.8" in note and "18.8" in note for note in paper.NOTES["pairwise"])


def test_a_report_says_which_rows_read_gold_passages():
    """Systems that read what they should find stood above RAG without a word."""
    assert "gold passages for MS-MARCO and FEVER 2-way" in paper.NOTES["table2"][0]


def test_points_of_figure_3_are_cells_of_table_6():
    """The figure is on dev: 15 passages for Natural Questions, 10 for MS-MARCO."""
    for run in ("rag_token", "rag_sequence"):
        for column, k in (("nq.em", 15), ("msmarco.rouge_l", 10), ("msmarco.bleu1", 10)):
            assert abs(paper.FIGURE3[column][run][k] - paper.TABLE6[run][column]) < 0.051


def test_what_the_paper_states_in_prose_agrees_with_its_tables():
    table1, table6 = paper.TABLE1, paper.TABLE6
    assert max(table1, key=lambda row: table1[row].get("tqa.em", 0)) == "DPR"
    assert max(table1, key=lambda row: table1[row]["wq.em"]) == "rag_token"
    for task in ("fever3.accuracy", "fever2.accuracy"):
        best = max(table6, key=lambda row: table6[row][task])
        assert best.startswith("bm25")
    ties = [column for column, value in table6["rag_token"].items()
            if value <= table6["frozen"][column]]
    assert ties == ["msmarco.bleu1"]


def test_every_row_of_figure_2_has_a_value_for_every_token():
    assert len(paper.FIGURE2) == 5
    for row in paper.FIGURE2:
        assert len(row) == len(paper.FIGURE2_TOKENS)
    for column in zip(*paper.FIGURE2, strict=True):
        assert 0.95 < sum(column) < 1.10
