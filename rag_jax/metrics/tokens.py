"""The tokenizers of two scorers, imitated in pure Python.

`spacy_tokens`: those of spaCy's rules for English, as MS-MARCO's scorer uses them.
`ptb_tokens`: those of Stanford's PTBTokenizer, as Q-BLEU's and COCO captions' scorers use them.
`words.toml` lists the words that they know.
"""

import re

from rag_jax import package_data

WORDS = package_data.table(__package__, "words.toml")

# --- spaCy --------------------------------------------------------------------------------------

_CURRENCY = r"US\$|C\$|A\$|[$£€¥฿₽﷼₴₠-₿]"
_PUNCTUATION = r"[,:;!?¿؟¡()\[\]{}<>_#*&。？！，、；：～·।،۔؛٪]"
_QUOTES = r"""'"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉"""
_SYMBOLS = r"[¦©®°\u2195-\u21cd\u2300-\u2bff\U0001f000-\U0001faff]"
_MARKS = rf"…+|\.\.+|{_PUNCTUATION}|[{_QUOTES}]|{_SYMBOLS}"
_UNITS = ("km²?|km³|m²?|m³|dm²?|dm³|cm²?|cm³|mm²?|mm³|ha|µm|nm|yd|in|ft|kg|g|mg|µg|t|lb|oz|m/s|km/h"
          "|mph|hPa|Pa|mbar|mb|MB|kb|KB|gb|GB|tb|TB|T|G|M|K|%")
_LOWER, _UPPER = "a-zà-öø-ÿ", "A-ZÀ-ÖØ-Þ"
_LETTER = r"[^\W\d_]"

_PREFIX = re.compile(rf"[§%=—–]|\+(?!\d)|{_MARKS}|{_CURRENCY}")
_SUFFIX = re.compile(
    rf"(?:{_MARKS}|['’][sS]|[—–]|(?<=\d)\+|(?<=°[FfCcKk])\.|(?<=\d)(?:{_CURRENCY}|{_UNITS})"
    rf"|(?<=[\d{_LOWER}%²+,:;!?)\]}}>_#*&{_QUOTES}-])\.|(?<=[{_UPPER}][{_UPPER}])\.)$")
_INFIX = re.compile(
    rf"\.\.+|…|{_SYMBOLS}|(?<=\d)[+*^-](?=[\d-])|(?<=[{_LOWER}{_QUOTES}])\.(?=[{_UPPER}{_QUOTES}])"
    rf"|(?<={_LETTER}),(?={_LETTER})|(?<=[^\W_])(?:---?|——|[–—~-])(?={_LETTER})"
    rf"|(?<=[^\W_])[:<>=/](?={_LETTER})")
_CONTRACTIONS = [re.compile(pattern) for pattern in WORDS["contractions"]]
_WHOLE, _NO_CONTRACTIONS = (frozenset(WORDS[name].split()) for name in ("whole", "no_contractions"))
_URL = re.compile(
    r"(?:https?|ftp)://\S+|\S+@[\w-]+(?:\.[\w-]+)+|(?:[\w-]+\.)+[a-z]{2,}(?::\d+)?(?:/\S*)?")


def spacy_tokens(text: str) -> list[str]:
    """Lower-cased tokens by spaCy's rules for English; "" for white space beyond single spaces.

    Source: MSMARCO-Question-Answering, ms_marco_eval.py. There the tokens are joined by spaces and
    split again, so that white space beyond a single space is an empty token for ROUGE-L, and none
    for BLEU. Reimplemented: of spaCy's table of special cases the contractions and the commoner
    abbreviations.
    """
    tokens = []
    for i, part in enumerate(re.split(r"(\s+)", text)):
        if i % 2 == 0:
            tokens += _spacy_word(part)
        elif part.removeprefix(" ") or not tokens:
            tokens.append("")
    return [token.lower() for token in tokens]


def _special(word: str) -> list[str] | None:
    """The parts of a contraction or abbreviation; None for other words."""
    if word in _WHOLE or re.fullmatch(r"[a-z]\.", word):
        return [word]
    folded = word[:1].lower() + word[1:]
    if folded not in _NO_CONTRACTIONS:
        for pattern in _CONTRACTIONS:
            if match := pattern.fullmatch(folded):
                return [part for part in match.groups() if part]
    return None


def _spacy_word(word: str) -> list[str]:
    """Tokens of a text without white space: affixes come off until a special case is left."""
    before, after = [], []
    while word and _special(word) is None:
        prefix, suffix = _PREFIX.match(word), _SUFFIX.search(word)
        if prefix and (rest := word[prefix.end() :]) and _special(rest) is not None:
            suffix = None
        elif suffix and (rest := word[: suffix.start()]) and _special(rest) is not None:
            prefix = None
        if prefix:
            before.append(prefix[0])
            word = word[prefix.end() :]
        if suffix and len(suffix[0]) <= len(word):
            after.append(suffix[0])
            word = word[: len(word) - len(suffix[0])]
        if not prefix and not suffix:
            break
    return [*before, *_middle(word), *reversed(after)]


def _middle(word: str) -> list[str]:
    if not word:
        return []
    if (special := _special(word)) is not None:
        return special
    if _URL.fullmatch(word):
        return [word]
    tokens, start = [], 0
    for infix in _INFIX.finditer(word):
        if infix.start() > start:
            tokens.append(word[start : infix.start()])
        tokens.append(infix[0])
        start = infix.end()
    return [*tokens, word[start:]] if start < len(word) else tokens


# --- Penn Treebank ------------------------------------------------------------------------------

_ABBREVIATIONS, _BEGINNINGS = (
    "|".join(WORDS[name].split()) for name in ("abbreviations", "beginnings"))
# Letters and digits; and the marks that the lexer takes for letters, such as decomposed accents,
# which stay as they are.
_CHARACTER = (r"(?:[^\W_½¼¾⅐-⅞²³¹⁰⁴-⁹₀-₉]|[\u0300-\u036f\u0483-\u0487\u0591-\u05bd\u05bf\u05c1"
              r"\u05c2\u05c4\u05c5\u05c7\u064b-\u065e\u0670\u0900-\u0903\u093c\u093e-\u094e])")
_BEGIN = rf"(?!\d){_CHARACTER}"  # of a word, unlike of a number
_CLITIC = rf"['’](?:s|m|d|ll|re|ve)(?!{_CHARACTER})"
_NEGATION = rf"n['’]t(?!{_CHARACTER})"
_SLASHED = r"[a-z0-9]+(?:-[a-z]+){0,2}"
_PTB = re.compile(
    rf"""https?://[^\s"<>|()]+[^\s"<>|.!?(){{}},-]
    | [\w.+-]{{1,64}}@[\w-]+(?:\.[\w-]+)+
    | (?:www\.(?:[\w-]+\.)+|(?:[^\s"`'<>|.!?:(){{}},-]{{1,63}}\.){{1,8}})
      (?:com|net|org|edu)(?!\w)(?:/\S*[\w/])?
    | (?:[a-z]\.){{2,}}(?:[a-z](?!\w|\.{_BEGIN})|(?:-{_CHARACTER}+)+|(?!{_BEGIN}))
    | [a-z]\.(?!{_BEGIN}|\s+(?-i:{_BEGINNINGS})\s)
    | (?:{_ABBREVIATIONS})\.(?!{_BEGIN})
    | (?:nos?|pp?)\.(?=\s*\d)
    | c\+\+ | [cf]\# | -[lr][rsc]b-
    | can(?=not(?!\w)) | (?:gon|wan)(?=na(?!\w)) | (?:gim|lem)(?=me(?!\w)) | got(?=ta(?!\w))
    | (?-i:[A-Z]+)(?:\$|(?-i:(?:[&+][A-Z]+)+))
    | (?:(?<!\w)-|\+)?[.,:]?\d+(?:[.,:]\d+)+(?:-{_CHARACTER}+)*
    | (?:(?<!\w)-|\+)\d+ | [.,:]\d+ | [²³¹⁰⁴-⁹]+ | [₀-₉]+
    | ['’](?:em | \d(?:\d(?!\S)|0s) | n['’]?(?!\w) | t(?=(?:is|was)(?!\w)))
    | {_CHARACTER}+?(?={_NEGATION}) | {_NEGATION} | {_CLITIC}
    | {_BEGIN}{_CHARACTER}*\.(?=[,;:]) | {_SLASHED}(?:\\?/{_SLASHED}){{1,2}}
    | (?:{_LETTER}+[aeiouy]['’‘](?-i:[aeiouA-Z]) | (?-i:[A-HJ-XZn])['’]{_LETTER}{{2}}){_LETTER}*
    | (?:(?:[dlo]['’])?{_BEGIN}{_CHARACTER}*
         (?:[.!?]{_BEGIN}{_CHARACTER}*)* | {_CHARACTER}+)
      (?:[-_‐‑]{_CHARACTER}+)*
    | @[a-z_][a-z_0-9]* | \#[^\W\d_]{_CHARACTER}*
    | [!?]+ | \.{{3}} | -{{2,}} | _+ | \S""", re.VERBOSE | re.IGNORECASE)
_REMOVED = frozenset("'' ' `` ` . ? ! , : - -- ... ; \" “ ” ‘ ’ « » – — …".split())
_WRITTEN = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-",
            "€": "$", "¤": "$", "₠": "$", "£": "#", "¢": "cents",
            "½": "1/2", "¼": "1/4", "¾": "3/4", "⅓": "1/3", "⅔": "2/3"}
_UNREADABLE = frozenset(map(chr, [  # the lexer drops them: joiners, and most currencies
    0x200D, *range(0xFE00, 0xFE10), *range(0x20A0, 0x20D0), *range(0x2150, 0x2153)]
    )) - {*_WRITTEN, "₤"}
_ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'"}
_ENTITY = re.compile("|".join(_ENTITIES))
_INVISIBLE = str.maketrans("", "", "\u00ad\u200b\u200e\ufeff")


def ptb_tokens(text: str) -> list[str]:
    """Lower-cased Penn Treebank tokens without punctuation, as COCO captions' scorer takes them.

    Brackets become "-lrb-" and stay: the scorer removes "-LRB-", after lower-casing.

    Source: coco-caption, ptbtokenizer.py. Reimplemented, as Stanford CoreNLP 3.4.1 needs Java; of a
    thousand sentences of Wikipedia it cuts about one otherwise.
    """
    text = _ENTITY.sub(lambda entity: _ENTITIES[entity[0]], text.translate(_INVISIBLE))
    tokens = (match[0].lower().replace("’", "'") for match in _PTB.finditer(text))
    return [_WRITTEN.get(token, token) for token in tokens
            if token not in _REMOVED and token not in _UNREADABLE]
