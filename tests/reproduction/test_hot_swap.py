"""The hot-swap on the user's files, by name: a second memory, and questions of two years."""

import bz2
import json
import re

import pytest

from rag_jax import api, paper
from rag_jax.cli import reproduce
from rag_jax.config import config_files, overrides
from rag_jax.files import quick_digest as digest
from rag_jax.reproduction import run
from rag_jax.reproduction.cells import Measurement
from rag_jax.reproduction.full import Full
from rag_jax.retrieval.index import PassageIndex

pytestmark = pytest.mark.usefixtures("compiled_with_less_effort")
PLACES = ("Peru", "Chile", "Cuba", "Mali", "Togo", "Chad")
LEADERS = {"2016": "Old {}", "2018": "New {}"}
DUMP = "enwiki-20161220-pages-articles.xml.bz2"
PAGE = ("<page><title>{1}</title><ns>0</ns><id>{0}</id><revision><id>1</id><text>{2}</text>"
        "</revision></page>")
CONFIG = '''"""How it is trained by hand."""
import pathlib
from rag_jax.config import config_files, overrides
from tests.end_to_end import smallest

def get_config(cell):
    assert cell == "table1/nq/rag_token"
    here = pathlib.Path(__file__).parent
    return overrides.replace(smallest.get_config(), {
        "runs": ("rag_token",), "data.passages": str(here / "passages.tsv"),
        "data.train": str(here / "train.jsonl"), "data.dev": str(here / "train.jsonl"),
        "data.generator_vocab": 320, "data.retriever_vocab": 120, "eval.metrics": ("qa",),
        "model.retriever.scan_layers": True, "model.generator.scan_layers": True,  # as the paper's
        "retriever_warmup.steps": 0, "generator_warmup.steps": 0, "train.steps": 1})
'''


def questions(path, name):
    path.write_text("\n".join(json.dumps(
        {"id": place, "question": f"Who is the President of {place}?",
         "answers": [name.format(place)]}) for place in PLACES) + "\n")


def dump(path, name):
    """Articles of 8 words and, the last one, of 103."""
    texts = [f"The President of {place} is {name.format(place)}." for place in PLACES]
    texts[-1] += " word" * 95
    pages = "".join(PAGE.format(i, *row) for i, row in enumerate(zip(PLACES, texts, strict=True)))
    path.write_bytes(bz2.compress(f"<mediawiki>{pages}</mediawiki>".encode()))


@pytest.fixture(scope="module", autouse=True)
def configs(tmp_path_factory):
    """A folder like configs/, with one cell of the smallest size and the files that it names."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "paper.py").write_text(CONFIG)
    questions(folder / "train.jsonl", LEADERS["2018"])
    rows = [f"{place}\t{place}\tThe President of {place} is New {place}." for place in PLACES]
    (folder / "passages.tsv").write_text("id\ttitle\ttext\n" + "\n".join(rows) + "\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(config_files, "CONFIGS", folder)
        patched.setattr(paper, "CELLS", {"table1/nq/rag_token": {"em": 44.1}})
        yield folder


@pytest.fixture
def data(tmp_path):
    """A --data_dir with everything in it."""
    folder = tmp_path / "data" / "hot_swap"
    folder.mkdir(parents=True)
    for year, name in LEADERS.items():
        questions(folder / f"leaders_{year}.jsonl", name)
    dump(folder / DUMP, LEADERS["2016"])
    return tmp_path / "data"


def execute(root, data):
    reproduce.main(["hot_swap", "--scale=paper", "--execute", f"--data_dir={data}",
                    f"--workdir={root}"])


def wanted(root, data):
    return {what.name for _, what in run.lacking(["hot_swap"], root, Full(root, str(data)))[0]}


def predictions(root, leaders, memory):
    name = Measurement(f"leaders_{leaders}", index=memory).name
    lines = (root / "nq" / "rag_token" / "measured" / name / "predictions.jsonl").read_text()
    return [json.loads(line) for line in lines.splitlines()]


def test_the_hot_swap_runs_by_name_on_the_files_of_the_user(tmp_path, data, capsys):
    root, swap = tmp_path / "root", data / "hot_swap"
    execute(root, data)
    text = (root / "report.md").read_text("utf-8")
    for memory, leaders, published in (("2016", "2016", "70.0"), ("2016", "2018", "4.0"),
                                       ("2018", "2016", "12.0"), ("2018", "2018", "68.0")):
        assert re.search(rf"^\| {memory} \| {leaders} \| \d+\.\d \[.*\] / {published} \|$", text,
                         re.M), (memory, leaders)
        found = predictions(root, leaders, memory)
        assert [r["references"] for r in found] == [[LEADERS[leaders].format(p)] for p in PLACES]
        ids = {passage["id"] for record in found for passage in record["passages"]}
        assert ids <= ({*PLACES} if memory == "2018" else {*"01234", "5.0", "5.1"}), memory
    assert re.search(r"The same answer from both indexes: \d+\.\d / 21\.0 percent", text)
    assert "Cannot be measured" not in text and wanted(root, data) == set()
    printed = capsys.readouterr().out
    assert printed.count("== nq/rag_token: ") == 4 and "How it is trained by hand" in printed

    # By hand, as the recipe says, it is the same index.
    built, = (root / "nq" / "indexes").glob("2016-*")
    config = overrides.replace(Full(root, str(data)).cells("nq", "rag_token")[0].running,
                               {"data.chunk_words": 100})
    by_hand = api.build_index(swap / DUMP, tmp_path / "by_hand", root / "nq", config=config)
    for name in ("passages_fingerprint", "encoder_fingerprint"):
        assert by_hand.manifest[name] == PassageIndex.open(built).manifest[name]

    # Another file is not taken for the one that was measured.
    questions(swap / "leaders_2016.jsonl", "Older {}")
    assert wanted(root, data) == {"leaders_2016-index_2016", "leaders_2016-index_2018"}
    questions(swap / "leaders_2016.jsonl", LEADERS["2016"])
    assert wanted(root, data) == set()
    dump(swap / DUMP, "Another {}")
    assert wanted(root, data) == {"leaders_2016-index_2016", "leaders_2018-index_2016"}
    assert digest(swap / DUMP)[:16] not in built.name
    dump(swap / DUMP, LEADERS["2016"])
    assert digest(swap / DUMP)[:16] in built.name and wanted(root, data) == set()

    # What was measured stays so when the 13 GB are removed.
    (swap / DUMP).unlink()
    scale = Full(root, str(data))
    assert not wanted(root, data) and not run.lacking(["hot_swap"], root, scale)[1]


def test_what_is_missing_is_said_before_anything_is_trained(tmp_path, data, capsys):
    swap = data / "hot_swap"
    (swap / DUMP).unlink()
    assert wanted(tmp_path, data) == {"leaders_2016-index_2018", "leaders_2018-index_2018"}
    (swap / "leaders_2018.jsonl").unlink()
    assert wanted(tmp_path, data) == {"leaders_2016-index_2018"}
    (swap / "leaders_2016.jsonl").write_text('{"id": "1", "question": "Who is it?"}\n')
    execute(tmp_path, data)
    assert not (tmp_path / "nq").exists(), "nothing can be measured, so nothing is trained"
    text = (tmp_path / "report.md").read_text("utf-8")
    table = text[text.index("Cannot be measured on these data"):text.index("## Table 1")]
    why = dict(re.findall(r"^\| nq/rag_token/(\S+) \| (.*) \|$", table, re.M))
    assert len(why) == 4
    for name in ("leaders_2018-index_2016", "leaders_2018-index_2018"):
        assert f"no file {swap / 'leaders_2018.jsonl'}: JSONL, for each of 82 offices" in why[name]
        assert "December 2018; the paper's list of the offices" in why[name]
        assert ("https://archive.org" in why[name]) == name.endswith("2016")
    assert f"no file {swap / DUMP}" in why["leaders_2016-index_2016"]
    assert "leaders_2016.jsonl:1" in why["leaders_2016-index_2018"]
    assert "answer" in why["leaders_2016-index_2018"]
    printed = capsys.readouterr().out
    for part in (*why.values(), f"rag_jax.build_index --workdir={tmp_path}/nq", f"{swap}/{DUMP}",
                 "--config.data.chunk_words=100", "Time, estimates", "2.6 chip-hours"):
        assert part in printed, part


def test_without_a_data_dir_the_default_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    scale = Full(tmp_path)
    why = run.lacking(["hot_swap"], tmp_path, scale)[1]["nq/rag_token/leaders_2016-index_2018"]
    assert f"no file {tmp_path}/rag_jax_data/hot_swap/leaders_2016.jsonl" in why
    assert "--data_dir is not given, so it is ~/rag_jax_data" in why
