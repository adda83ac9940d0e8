"""Every cell of the heat map stands where its token and passage are."""

import re

import pytest

from rag_jax import heatmap
from rag_jax.errors import UserError
from rag_jax.visible import columns

TOKENS = [" Lima", ".", "</s>"]
PASSAGES = ["2018/Peru/capital", "<b>&"]
POSTERIOR = [[0.9, 0.1], [0.25, 0.75], [1.0, 0.0]]


def test_terminal_rows_are_passages_and_columns_tokens():
    lines = heatmap.terminal(TOKENS, PASSAGES, POSTERIOR, colour=False).splitlines()
    assert lines[0].split() == ["Lima", ".", "</s>"]
    assert lines[1].split() == ["2018/Peru/capital", "90", "25", "100"]
    assert lines[2].split() == ["<b>&", "10", "75", "0"]
    assert len({len(line) for line in lines}) == 1, "columns stand under each other"
    wide = heatmap.terminal(["東京", "a"], ["東京都", "ab"], [[0.5, 0.5]] * 2, colour=False)
    assert {columns(line) for line in wide.splitlines()} == {6 + 1 + 5 + 4}


def test_colour_changes_no_letter():
    plain = heatmap.terminal(TOKENS, PASSAGES, POSTERIOR, colour=False)
    coloured = heatmap.terminal(TOKENS, PASSAGES, POSTERIOR)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain != coloured


def test_html_escapes_and_holds_every_value(tmp_path):
    heatmap.write(tmp_path / "map.html", "Who <is> it?", TOKENS, PASSAGES, POSTERIOR)
    text = (tmp_path / "map.html").read_text("utf-8")
    assert "Who &lt;is&gt; it?" in text and "&lt;b&gt;&amp;" in text and "<b>" not in text
    cells = [float(v) for v in re.findall(r'title="([\d.]+)"', text)]
    assert cells == [0.9, 0.25, 1.0, 0.1, 0.75, 0.0]


def test_png_is_written_where_matplotlib_is(tmp_path):
    """Dollars in data were taken for formulas, and a wrong one ended the command."""
    money = r"$\foo$"
    heatmap.write(tmp_path / "map.png", money, [*TOKENS[:2], money], [money, "b"], POSTERIOR)
    assert [file.name for file in tmp_path.iterdir()] == ["map.png"]
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_no_style_of_the_current_folder_is_taken(tmp_path):
    """With text.usetex a matplotlibrc among downloaded files had a TeX run, with its preamble."""
    import matplotlib

    heatmap.write(tmp_path / "usual.png", "Who?", TOKENS, PASSAGES, POSTERIOR)
    with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "red"}):
        heatmap.write(tmp_path / "map.png", "Who?", TOKENS, PASSAGES, POSTERIOR)
        assert matplotlib.rcParams["axes.facecolor"] == "red", "what others draw is as before"
    assert (tmp_path / "map.png").read_bytes() == (tmp_path / "usual.png").read_bytes()


@pytest.mark.parametrize("suffix", ["html", "png"])
def test_another_map_of_that_name_is_put_aside(tmp_path, suffix, capsys):
    path = tmp_path / f"map.{suffix}"
    path.write_text("mine")
    heatmap.write(path, "Who?", TOKENS, PASSAGES, POSTERIOR)
    assert (tmp_path / f"earlier-map.{suffix}").read_text() == "mine" != path.read_bytes()
    assert "earlier" in capsys.readouterr().out


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"must end in .html or .png"):
        heatmap.write(tmp_path / "map.pdf", "Who?", TOKENS, PASSAGES, POSTERIOR)
