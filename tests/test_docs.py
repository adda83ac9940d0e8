"""The pages of docs/: every block of Python runs as it stands, one after the other."""

import pathlib
import re
import shutil

import jax
import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGES = sorted(set(DOCS.glob("*.md")) - {DOCS / "serving.md"})  # whose clients need a server


def blocks(page: pathlib.Path) -> list[str]:
    """The page's blocks of Python, each with the page's line numbers."""
    text = page.read_text("utf-8")
    return ["\n" * text[: block.start(1)].count("\n") + block[1]
            for block in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)]


def run(page: pathlib.Path) -> dict:
    """The names that a page's blocks leave behind; errors name the page and its line."""
    names: dict = {"__name__": "__main__"}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), names)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, request):
    """An example that has fallen behind the code misleads everybody who starts from it."""
    monkeypatch.chdir(tmp_path)
    if any("runs/quickstart" in block for block in blocks(page)):
        trained = request.getfixturevalue("uninterrupted")
        shutil.copytree(trained, tmp_path / "runs" / "quickstart")
    names = run(page)
    if page.stem == "functional":
        assert_gradient_reaches_all_towers(names)


def assert_gradient_reaches_all_towers(names: dict) -> None:
    """The page promises RAG-Token's loss and its gradient, in fewer than 25 lines."""
    first = blocks(next(page for page in PAGES if page.stem == "functional"))[0]
    assert sum(bool(line.strip()) for line in first.splitlines()) < 25
    assert set(names["gradient"]) == {"query_encoder", "document_encoder", "generator"}
    for tower, gradient in names["gradient"].items():
        assert any(abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(gradient)), tower
