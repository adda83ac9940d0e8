"""The built wheel, unpacked into a folder: its programs run where there is no checkout."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
CHECK = """
import contextlib, importlib, io, pathlib, sys
import rag_jax
from rag_jax.cli import flags
from rag_jax.config import config_files
site, programs = pathlib.Path(sys.argv[1]), sys.argv[2:]
assert site in pathlib.Path(rag_jax.__file__).parents, rag_jax.__file__
for name in programs:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            importlib.import_module(f"rag_jax.cli.{name}").main(["--help"])
        except SystemExit as stop:
            assert not stop.code, name
    assert f"python -m rag_jax.{name}" in text.getvalue()
    if name == "train":
        assert all(file in text.getvalue() for file in config_files.shipped())
for file in config_files.shipped():
    config_files.load_file(file + ":table1/nq/rag_token" * file.endswith("/paper.py"))
assert flags.parse_with_config(flags.make_parser("train", ""), [])[1].data.fictional_countries
print(*config_files.shipped())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The wheel's content, built from a copy: setuptools writes beside its sources."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("out")
    for folder in ("rag_jax", "configs"):
        shutil.copytree(ROOT / folder, copy / folder,
                        ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    done = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    wheel, = out.glob("rag_jax-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def test_the_wheel_has_every_file_of_the_package_and_the_configs(site):
    """countries.jsonl, or a config, that is left out is missed by a user alone."""
    def names(folder):
        return {str(file.relative_to(folder)) for file in folder.rglob("*")
                if file.is_file() and "__pycache__" not in file.parts}

    inside = names(site / "rag_jax")
    assert inside == names(ROOT / "rag_jax") | {f"configs/{n}" for n in names(ROOT / "configs")}
    assert not [path for path in site.iterdir() if path.name in ("configs", "tests")]


def test_the_programs_of_the_wheel_run_in_another_folder(site, tmp_path):
    """`train` and every --help ended with "no such file"."""
    programs = ("train", "evaluate", "generate", "build_index", "compile_report", "convert",
                "reproduce", "verify")
    done = subprocess.run([sys.executable, "-c", CHECK, str(site), *programs], cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == sorted(f"configs/{f.name}" for f in ROOT.glob("configs/*.py"))
