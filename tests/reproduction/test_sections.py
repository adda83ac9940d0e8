"""The report as files: text is text, tables stay tables, pictures are found."""

import base64
import re

from rag_jax.reproduction import plots
from rag_jax.reproduction.sections import Plot, Section, Table, write

PNG = b"\x89PNG\r\n\x1a\n rest"


def test_both_reports_hold_every_part(tmp_path):
    table = Table(["a|b", "c"], [["x|y", "two\nlines"], ["<i>", "1"]])
    write(tmp_path, "Title", [Section("First", ["Text & more.", table]),
                              Section("Second", [Plot("curve", "A curve.", PNG),
                                                 Plot("none", "No picture.", None)])])
    text, page = ((tmp_path / f"report.{kind}").read_text("utf-8") for kind in ("md", "html"))
    assert "# Title" in text and "## First" in text and "| x\\|y | two lines |" in text
    assert "![A curve.](figures/curve.png)" in text
    assert (tmp_path / "figures" / "curve.png").read_bytes() == PNG
    assert [f.name for f in (tmp_path / "figures").iterdir()] == ["curve.png"]
    assert "Text &amp; more." in page and "&lt;i&gt;" in page and "<i>" not in page
    assert base64.b64decode(re.search(r"base64,([^\"]+)", page)[1]) == PNG
    for report in (text, page):
        assert "rag_jax[plots]" in report and "No picture." in report


def test_what_data_hold_is_text_in_both_reports(tmp_path):
    """A generated sentence with HTML became a part of the Markdown report."""
    evil = "<img src=x onerror=y> [a](javascript:z) \x1b[2J\u202e"
    write(tmp_path, "Title", [Section("S", [evil, Table(["a"], [[evil]])])])
    text, page = ((tmp_path / f"report.{kind}").read_text("utf-8") for kind in ("md", "html"))
    assert "<img" not in text + page and "](" not in text
    assert not set(text + page) & set("\x1b\u202e")


def test_plots_are_png_files_or_nothing(monkeypatch):
    import builtins

    maps = {"ours": (["a", " b"], ["p", "q"], [[0.1, 0.9], [0.9, 0.1]])}
    panels = {"ours": {"RAG-Token": {1: 10.0, 5: 20.0}}, "paper": {}}
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", without)
        assert plots.curves(panels) is None and plots.heat_maps(maps) is None
    assert plots.curves(panels).startswith(PNG[:8])
    assert plots.heat_maps(maps).startswith(PNG[:8])


def test_plots_take_no_style_of_the_current_folder():
    """A matplotlibrc there is read when matplotlib is imported."""
    import matplotlib

    panels, draw = {"ours": {"RAG-Token": {1: 12.5}}}, plots.curves.__wrapped__
    usual = plots._once(draw)(panels)
    with matplotlib.rc_context({"axes.facecolor": "red"}):
        assert plots._once(draw)(panels) == usual != draw(panels)


def test_a_picture_is_drawn_again_for_other_data_alone(monkeypatch):
    """A report of all experiments is written after every model."""
    drawn = []
    monkeypatch.setattr(plots, "_png", lambda figure: drawn.append(figure) or PNG)
    for recall in (31.0, 31.0, 32.0):
        assert plots.curves({"once": {"RAG": {1: recall}}}) == PNG
    assert len(drawn) == 2
