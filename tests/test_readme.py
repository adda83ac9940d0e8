"""README and the pages of docs/ say what is true: commands, fields, files, links, presets."""

import pathlib
import re

import pytest

from rag_jax import config
from rag_jax.config import config_files, overrides, rules

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text("utf-8") for page in PAGES)


def commands() -> list[str]:
    """Every command line of the pages' code blocks, once, continuation lines joined."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.S | re.M)
    text = "\n".join(block for language, block in blocks if not language)
    lines = text.replace("\\\n", " ").splitlines()
    return sorted({line for line in lines if "rag_jax." in line or "pip install" in line})


def test_there_are_exactly_two_marked_commands():
    for name in ("main job", "tests"):
        block = README.split(f"<!-- {name} -->")[1].split("<!-- end -->")[0]
        assert len([line for line in block.splitlines() if line and line[0] != "`"]) == 1
    first_screen = README.splitlines()[:30]
    assert any("python -m rag_jax.train" in line for line in first_screen)


@pytest.mark.parametrize("command", commands())
def test_commands_name_what_exists(command):
    for module in re.findall(r"-m (rag_jax\.\w+)", command):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
        source = (ROOT / (module.replace("rag_jax.", "rag_jax/cli/") + ".py")).read_text()
        source += (ROOT / "rag_jax/cli/flags.py").read_text()
        for flag in re.findall(r" (--[\w-]+)", command):
            assert f'"{flag}"' in source or flag == "--help", flag
    for path in re.findall(r"configs/\w+\.py(?::[\w/]+)?", command):
        rules.validate(overrides.replace(config_files.load_file(str(ROOT / path)), {
            "data.passages": "p", "data.train": "t", "data.dev": "d"}))
    for dotted in re.findall(r"--config\.([\w.]+)=", command):
        assert dotted in overrides.fields(), dotted


def test_config_fields_in_the_text_exist():
    sections = {name.rpartition(".")[0] for name in overrides.fields()}
    for dotted in re.findall(r"`(?:--)?config\.([\w.]+)`", TEXT):
        assert dotted in overrides.fields() or dotted in sections, dotted


def test_rooms_in_the_table_exist():
    for name in re.findall(r"`(rag_jax/[\w/.]+)`", TEXT):
        assert (ROOT / name).exists(), name


def test_presets_and_runs_are_named():
    for preset in {**config.BERT_PRESETS, **config.BART_PRESETS}:
        assert f"`{preset}`" in TEXT
    assert config_files.QUICKSTART.exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """A page that was moved or renamed left its links behind."""
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


def test_readme_is_short():
    """What a page says is not said again on the first one."""
    assert len(README.splitlines()) <= 250
