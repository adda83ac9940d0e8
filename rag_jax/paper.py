"""The paper's published numbers (arXiv 2005.11401v4), as `paper.toml` has them.

Tables are {row: {TASK.METRIC: percent}}; our rows have the names of `config.runs`.
"""

from rag_jax import package_data


def _table(text: str) -> dict[str, dict[str, float]]:
    """{row: {column: number}} of a table in columns of text; "-" = the paper has no number."""
    (_, *columns), *rows = (line.split() for line in text.strip().splitlines())
    return {name: {column: float(cell) for column, cell in zip(columns, cells, strict=True)
                   if cell != "-"} for name, *cells in rows}


_DATA = package_data.table(__package__, "paper.toml")
TABLE1, TABLE2, TABLE4, TABLE5, TABLE6 = (
    _table(_DATA[f"table{number}"]) for number in (1, 2, 4, 5, 6))
TABLE3, TABLE4_PAIRS = _DATA["table3"], _DATA["table4_pairs"]
COLUMNS, OURS, NOTES = _DATA["columns"], _DATA["ours"], _DATA["notes"]
HOT_SWAP, HOT_SWAP_SAME = _DATA["hot_swap"], _DATA["hot_swap_same"]
FEVER_OVERLAP = {int(k): percent for k, percent in _DATA["fever_overlap"].items()}
RECALL_AT_5, ANSWER_IN_NO_PASSAGE = _DATA["recall_at_5"], _DATA["answer_in_no_passage"]
FIGURE2_TOKENS, FIGURE2 = _DATA["figure2_tokens"], _DATA["figure2"]
FIGURE3 = {column: {run: {int(k): percent for k, percent in curve.items()}
                    for run, curve in _table(text).items()}
           for column, text in _DATA["figure3"].items()}
FROM_NQ = ("wq", "ct")  # start from the same model trained on Natural Questions (section 3.1)
PARTIAL_DECODING = _DATA["partial_decoding"]

# Beside the EM of a run of any task: the nearest figure of the paper, of which model and split.
BESIDE_EM = {
    "closed_book": f"{TABLE1['T5-11B']['nq.em']} (T5-11B, NQ test)",
    "rag_token": f"{TABLE1['rag_token']['nq.em']} (RAG-Token, NQ test)",
    "rag_sequence": f"{TABLE1['rag_sequence']['nq.em']} (RAG-Sequence, NQ test)",
    **{run: f"{TABLE6[run]['nq.em']} (RAG-Token, NQ dev)" for run in ("frozen", "bm25")},
    **{run: f"{TABLE6[run]['nq.em']} (RAG-Sequence, NQ dev)"
       for run in ("frozen_sequence", "bm25_sequence")},
}
BESIDE_RECALL = {"trained": f"{RECALL_AT_5['trained']} (RAG-Token, NQ dev)",
                 "frozen": f"{RECALL_AT_5['frozen']} (DPR, NQ dev)"}
FROZEN = {"rag_token": "frozen", "rag_sequence": "frozen_sequence"}  # without the retriever's part
BESIDE_ADDED = {
    f"EM, {run} above {FROZEN[run]}":
        f"{TABLE6[run]['nq.em'] - TABLE6[FROZEN[run]]['nq.em']:+.1f} ({model}, NQ dev)"
    for run, model in (("rag_token", "RAG-Token"), ("rag_sequence", "RAG-Sequence"))}
BESIDE_HOT_SWAP = {name: f"{value} (RAG, 82 leaders)" for name, value in HOT_SWAP.items()}


def _cells() -> dict[str, dict[str, float]]:
    cells: dict[str, dict[str, float]] = {}
    for name, table in (("table1", TABLE1), ("table2", TABLE2), ("table6", TABLE6)):
        for run in [row for row in table if row in OURS]:
            for column, score in table[run].items():
                task, metric = column.split(".")
                twice = name == "table6" and run in TABLE1
                merged = task.startswith("fever") and run.endswith("_sequence")
                if task != "tqa_wiki" and not twice and not merged:
                    cells.setdefault(f"{name}/{task}/{run}", {})[metric] = score
    return cells


# {TABLE/TASK/RUN: {metric: score}} for every model of ours that a table has. Table 6 repeats RAG's
# rows, on dev; FEVER's cells are of both kinds of RAG; tqa_wiki is another test set of tqa's model.
CELLS = _cells()
