"""Opens tokenizers that others made; refuses damaged ones and those that might never end."""

import importlib.util
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from rag_jax.errors import DataError

SIZE_LIMIT = 48_000_000  # bytes; bart-large's has 3.5 MB, multilingual ones have 17, Gemma 3's 33
SETTINGS_LIMIT = 4_000_000  # Llama 3's have 50 KB, Gemma 3's 1.2 MB
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "sentencepiece.bpe.model",
                "spiece.model", "tokenizer.model")  # any of them makes a tokenizer
SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
FILES = (*VOCABULARIES, SETTINGS, TEMPLATE, "special_tokens_map.json", "added_tokens.json",
         "merges.txt")  # all that a tokenizer may be made of
SPECIALS = ("bos_token", "eos_token", "cls_token", "sep_token", "pad_token", "mask_token",
            "unk_token")
KEPT = (*SPECIALS, "chat_template")
# The model type of a folder that names none, as those in a RAG checkpoint of 2020, by the name of
# its vocabulary.
MODEL_TYPES = {"spiece.model": "t5", "sentencepiece.bpe.model": "xlm-roberta",
               "vocab.txt": "bert", "vocab.json": "bart"}
# Settings of tokenizer_config.json that override fields of these parts of a tokenizer.json, as in
# transformers' classes for BERT, BART and others; its classes FROM_FILE take the file as it is.
OVERRIDES = {"BertNormalizer": {"do_lower_case": "lowercase", "strip_accents": "strip_accents",
                                "tokenize_chinese_chars": "handle_chinese_chars"},
             "ByteLevel": {"add_prefix_space": "add_prefix_space"}}
FROM_FILE = ("PreTrainedTokenizer", "TokenizersBackend")
# What BertTokenizer takes for settings that are left out.
BERT = {"do_lower_case": True, "tokenize_chinese_chars": True, "strip_accents": None}
PROBE = "The \"Größe\" of 漢字 isn't 3.5 km; it's HALF: that\tmuch // </s> 🙂\n"
_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+"
          r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
KNOWN_PATTERNS = (" {2,}", _WORDS % "", _WORDS % "{1,3}")  # of XLM-R, Qwen, Llama 3
# Each of these parts can make a text many times as long; the factors of several multiply.
GROWING, GROWTH_LIMIT, CONTENT_LIMIT = ("Replace", "Prepend", "Precompiled"), 3, 16


def read(file: pathlib.Path) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json, with what the settings beside it override.

    Raises:
      DataError: it is damaged, or `check` refuses it.
    """
    import tokenizers

    size = file.stat().st_size
    if size > SIZE_LIMIT:
        raise DataError(f"{file}: {size} bytes; a tokenizer.json has at most {SIZE_LIMIT}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:
        raise _translated(error, file) from None
    config = _settings(file.parent)
    taken = _class(file.parent, config)
    if taken == "LlamaTokenizer":
        _with_spaces(backend, config)
    defaults = BERT if taken == "BertTokenizer" else {}
    config = {**defaults, **config}
    for part in (backend.normalizer, backend.pre_tokenizer):
        for name, field in OVERRIDES.get(type(part).__name__, {}).items():
            value = config.get(name)
            if taken not in FROM_FILE and (
                    isinstance(value, bool) or value is None and defaults.get(name, 0) is None):
                setattr(part, field, value)
    check(backend, file)
    return backend


def _class(folder: pathlib.Path, config: Mapping[str, Any]) -> str:
    """The class, without "Fast", with which transformers opens a folder's tokenizer.json; it has
    another than the one that is named for some types of models.

    config: the content of the folder's tokenizer_config.json.
    """
    model = _json(folder / "config.json")
    kind = model.get("model_type")
    named = config.get("tokenizer_class") or model.get("tokenizer_class") or (
        "BertTokenizer" if kind == "bert" else "")
    name = str(named).removesuffix("Fast")
    if kind == "modernbert" or name == "LlamaTokenizer" and kind not in (None, "llama"):
        return FROM_FILE[0]
    return name


def _with_spaces(backend: Any, config: Mapping[str, Any]) -> None:
    """Has a tokenizer of Llama 2's form write spaces as transformers' LlamaTokenizer does, whatever
    its file says: one is put before a text; and before what follows a special token only where the
    settings say `legacy`. Byte-level tokenizers, as Llama 3's, stay as they are.
    """
    from tokenizers import pre_tokenizers

    parts = (backend.pre_tokenizer, backend.decoder, backend.post_processor)
    kinds = {kind for part in parts if part is not None
             for kind, _ in _parts(json.loads(part.__getstate__()))}
    if "ByteLevel" in kinds or type(backend.model).__name__ != "BPE":
        return
    prefixed = config.get("add_prefix_space")
    scheme = ("never" if prefixed is not None and not prefixed
              else "always" if config.get("legacy") else "first")
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)


def by_transformers(source: str | pathlib.Path) -> tuple[Any, dict[str, str]]:
    """The `tokenizers.Tokenizer`, and the settings, that transformers makes of a Hugging Face name,
    or of a folder without a tokenizer.json.

    Raises:
      DataError: there is no tokenizer, or `check` refuses it.
    """
    import transformers

    folder, how = pathlib.Path(source), {}
    files = [name for name in VOCABULARIES if (folder / name).is_file()]
    if not (folder / "config.json").is_file() and "tokenizer_class" not in _settings(folder):
        kind = next((kind for name, kind in MODEL_TYPES.items() if name in files), None)
        how = {"config": transformers.AutoConfig.for_model(kind)} if kind else {}
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(
            str(source), trust_remote_code=False, **how)
        backend = loaded.backend_tokenizer
    except Exception as error:  # the library's many readers raise errors of any kind
        reason = str(error).partition("\n")[0] or type(error).__name__
        pieces = [name for name in files if name.endswith(".model")]
        if pieces and importlib.util.find_spec("sentencepiece") is None:
            reason = f"pip install sentencepiece, which reads its {' and '.join(pieces)}"
        raise DataError(
            f"no tokenizer at {str(source)!r}: expected a tokenizer.json, a folder with one, or a "
            f"Hugging Face name that is cached or can be downloaded ({reason})"
        ) from None
    check(backend, source)
    config = {name: getattr(loaded, name, None) for name in KEPT}
    if isinstance(config["chat_template"], dict):  # several, by their names
        config["chat_template"] = config["chat_template"].get("default")
    return backend, _kept(config)


def settings(folder: pathlib.Path) -> dict[str, str]:
    """The names of special tokens, and the chat_template, in the files beside a tokenizer.json."""
    config = _settings(folder)
    if (folder / TEMPLATE).is_file():
        config["chat_template"] = _text(folder / TEMPLATE)
    return _kept(config)


def has_token_types(folder: pathlib.Path) -> bool:
    """Whether the two texts of a pair have token types of their own: not if the settings beside a
    tokenizer.json name inputs of the model, and none of them is token_type_ids."""
    inputs = _settings(folder).get("model_input_names")
    return not isinstance(inputs, list) or "token_type_ids" in inputs


def _kept(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings KEPT; of several chat templates the one that transformers takes."""
    named = {name: value.get("content") if isinstance(value, dict) else value
             for name in SPECIALS if (value := config.get(name))}
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((each for each in template
                         if isinstance(each, dict) and each.get("name") == "default"), None)
    named["chat_template"] = template.get("template") if isinstance(template, dict) else template
    return {name: value for name, value in named.items() if isinstance(value, str)}


def _settings(folder: pathlib.Path) -> dict[str, Any]:
    """The tokenizer_config.json of a folder; empty where there is none."""
    return _json(folder / SETTINGS)


def _json(file: pathlib.Path) -> dict[str, Any]:
    """The content of a file; empty where there is none."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: no JSON ({error}); take it from its source again") from None
    return content if isinstance(content, dict) else {}


def _text(file: pathlib.Path) -> str:
    with file.open("rb") as stream:
        content = stream.read(SETTINGS_LIMIT + 1)
    if len(content) > SETTINGS_LIMIT:
        raise DataError(f"{file}: more than {SETTINGS_LIMIT} bytes, which no such file needs")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: no UTF-8 ({error}); take it from its source again") from None


def check(backend: Any, source: str | pathlib.Path) -> None:
    """Raises DataError for a tokenizer whose parts, ids or pieces are not those of a language."""
    growing = 0
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(backend, name)
        for kind, value in _parts(json.loads(part.__getstate__())) if part is not None else ():
            pattern = value.get("pattern")
            if isinstance(pattern, dict) and pattern.get("Regex", KNOWN_PATTERNS[0]
                                                         ) not in KNOWN_PATTERNS:
                raise DataError(f"{source}: its {name} has a regular expression, which could run "
                                "for ever; known are those of XLM-R, Qwen and Llama 3")
            growing += kind in GROWING
            content = value.get("content", value.get("prepend", ""))
            if growing > GROWTH_LIMIT or kind in GROWING and len(content) > CONTENT_LIMIT:
                raise DataError(f"{source}: its {name} replaces by too much: more than "
                                f"{GROWTH_LIMIT} replacements, or longer than {CONTENT_LIMIT}")
    try:
        count, largest = backend.get_vocab_size(), max(backend.get_vocab().values(), default=0)
        ids = backend.encode_batch([PROBE], add_special_tokens=False)[0].ids
        backend.decode(ids)
    except BaseException as error:
        raise _translated(error, source) from None
    if largest > 2 * count + 1000:
        raise DataError(f"{source}: {count} tokens with ids up to {largest}; a model's table would "
                        "have a row for each id: number them from 0 on")
    if len(ids) > 20 * len(PROBE.encode()):
        raise DataError(f"{source}: it makes {len(ids)} tokens of {len(PROBE)} letters")


def _parts(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        if isinstance(value.get("type"), str):
            yield value["type"], value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _parts(inner)


def _translated(error: BaseException, source: str | pathlib.Path) -> BaseException:
    """The error to raise for one of the library, which raises Exception itself, or a panic of Rust,
    which is not even an Exception."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return DataError(f"{source}: damaged, or no tokenizer ({str(error)[:200]}); take it from "
                         "its source again")
    return error
