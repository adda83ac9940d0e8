"""The model card of an exported checkpoint: its README.md, for people and for the hub."""

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import rag_jax
from rag_jax import package_data
from rag_jax.hub.families import BARE, DATA, Family

_VECTORS = (" Where the folder has a modules.json, `SentenceTransformer(FOLDER).encode([TEXT])` of "
            "sentence-transformers gives the vectors of texts; transformers gives the states of "
            "their tokens.")


# By what it is, the fields of the configuration that name it, and their values.
Beyond = Mapping[str, Mapping[str, str]]


class Provenance(NamedTuple):
    """Where an exported checkpoint comes from; empty where its workdir does not say."""

    run: str  # the trained run; "" = towers that were converted or warmed up
    base: Mapping[str, str]  # by tower, the checkpoint that it started from
    data: Mapping[str, str]  # passages, train, dev, test: names of tasks, files or folders
    scores: Mapping[str, Mapping[str, float]]  # by split, those that the run was evaluated with
    beyond: Beyond = {}  # on what its p(z|x) depends besides the export


def model_card(family: Family, provenance: Provenance) -> str:
    """The text of README.md.

    Args:
      family: its class of transformers.
      provenance: what its workdir says; absolute paths appear by their last part alone.
    """
    is_rag, tower = family.model_type == "rag", next(iter(family.places))
    tokenizer = "RagTokenizer" if is_rag else "AutoTokenizer"
    field = "rag" if is_rag else "retriever" if tower == "bert" else tower
    base = [f"- {tower.replace('_', ' ')}: {_name(source)}"
            for tower, source in provenance.base.items()]
    data = [f"- {name}: {_name(source)}" for name, source in provenance.data.items()]
    return package_data.text(__package__, "model_card.md").format(
        family=family.architecture,
        what=DATA["about"][family.model_type] + _VECTORS * (family.model_type in BARE),
        version=rag_jax.__version__,
        origin=f"the trained run `{provenance.run}`" if provenance.run else (
            "a workdir without a trained run"),
        base="\n".join(base) or "None: trained from scratch, or not known.",
        data="\n".join(data) or "Not known.",
        scores=_table(provenance.scores) + _beside(provenance.beyond),
        field=field, tokenizer=tokenizer,
        classes=", ".join(sorted((family.architecture, tokenizer))))


def _name(source: str) -> str:
    """A source as others may read it: folders of one machine tell them nothing."""
    return f"`{_relative(source)}`"


def _relative(source: str) -> str:
    path = pathlib.Path(source)
    return path.name if path.is_absolute() else source


def _beside(beyond: Beyond) -> str:
    return "".join(
        f"\n\nIn its run, passages and p(z|x) depend on {what}, too, of which this folder has "
        "nothing. With rag_jax, set " + ", ".join(
            f"`config.{name}={_relative(value)}`" for name, value in fields.items()) + "."
        for what, fields in beyond.items())


def _table(scores: Mapping[str, Mapping[str, float]]) -> str:
    if not scores:
        return "The workdir holds no evaluation of it."
    rows = [("metric", *scores), ("---", *("---" for _ in scores))]
    for metric in dict.fromkeys(name for each in scores.values() for name in each):
        values = (each.get(metric) for each in scores.values())
        rows.append((metric, *(
            f"{value:.4g}" if isinstance(value, (int, float)) else ""
            for value in values)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
