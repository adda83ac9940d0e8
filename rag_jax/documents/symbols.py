"""The characters of Word's symbol fonts, which number them in their own way, in Unicode."""

# From 0x20 and from 0xa0 on, as in Adobe's table of the font.
_SYMBOL = {0x20: " !∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_"
                 "‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼",
           0xa0: "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊〈®©™∑",
           0xf1: "〉∫"}
_WINGDINGS = {0x4a: "☺", 0x6c: "●", 0x6e: "■", 0x6f: "□", 0x76: "❖", 0xa7: "▪", 0xa8: "◻",
              0xd8: "➢", 0xdf: "←→↑↓", 0xf0: "⇨", 0xfb: "✗✓☒☑"}
_FONTS = {font: {first + n: one for first, run in runs.items() for n, one in enumerate(run)}
          for font, runs in (("symbol", _SYMBOL), ("wingdings", _WINGDINGS))}
_PRIVATE = range(0xf000, 0xf100)  # where Word moves the characters of these fonts


def symbol(font: str, number: str) -> str:
    """The character of a font with a hexadecimal number; "" = it is not known."""
    try:
        code = int(number, 16)
    except ValueError:
        return ""
    if known := _FONTS.get(font.lower()):
        return known.get(code - _PRIVATE.start if code in _PRIVATE else code, "")
    return chr(code) if 0x20 <= code < 0xd800 else ""  # no symbol font numbers these
