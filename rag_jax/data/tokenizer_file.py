"""Opens tokenizers that others made; refuses damaged ones and those that might never end."""

import importlib.metadata
import importlib.util
import json
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rag_jax.errors import DataError

_log = logging.getLogger(__name__)
# It advises to change the files of Mistral Small 3, which are read as they are.
logging.getLogger("transformers.models.auto.tokenization_auto").setLevel(logging.ERROR)
SIZE_LIMIT = 48_000_000  # bytes; bart-large's has 3.5 MB, multilingual ones have 17, Gemma 3's 33
SETTINGS_LIMIT = 4_000_000  # Llama 3's have 50 KB, Gemma 3's 1.2 MB
ENTRIES_LIMIT = 10_000  # of all settings; Gemma 3's have 6,500
TOKENIZER = "tokenizer.json"
VOCABULARIES = (TOKENIZER, "vocab.json", "vocab.txt", "sentencepiece.bpe.model",
                "spiece.model", "tokenizer.model")  # any of them makes a tokenizer
SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
# What transformers would read besides: other templates, and files in place of the tokenizer.json.
TEMPLATES, OTHERS = "additional_chat_templates", "fast_tokenizer_files"
MORE = ("special_tokens_map.json", "added_tokens.json")
BESIDE = (SETTINGS, TEMPLATE, *MORE)  # what is read with a tokenizer.json
FILES = (*VOCABULARIES, *BESIDE, "merges.txt")  # all that a tokenizer may be made of
TYPES = "token_type_ids"  # an input of models: which of two texts a token is of
SPECIALS = ("bos_token", "eos_token", "cls_token", "sep_token", "pad_token", "mask_token",
            "unk_token")
KEPT = (*SPECIALS, "chat_template")
# The model type of a folder that names none, as those in a RAG checkpoint of 2020, by the name of
# its vocabulary.
MODEL_TYPES = {"spiece.model": "t5", "sentencepiece.bpe.model": "xlm-roberta",
               "vocab.txt": "bert", "vocab.json": "bart"}
WAY = "1"  # of reading; another one where `read` gives other tokens
# Fields of the parts of a tokenizer.json which a class of transformers may set otherwise: where
# spaces come, case and accents.
FREE = ("add_prefix_space", "prepend_scheme", "trim_offsets", "lowercase", "strip_accents",
        "handle_chinese_chars", "clean_text")
PROBE = "The \"Größe\" of 漢字 isn't 3.5 km; it's HALF: that\tmuch // </s> 🙂\n"
_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+"
          r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# Of XLM-R, Qwen, Llama 3 and Mistral's Tekken (where a word begins with its capitals).
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
KNOWN_PATTERNS = (" {2,}", _WORDS % "", _WORDS % "{1,3}", (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"))
# Each of these parts can make a text many times as long; the factors of several multiply.
GROWING, GROWTH_LIMIT, CONTENT_LIMIT = ("Replace", "Prepend", "Precompiled"), 3, 16


def read(source: str | pathlib.Path) -> tuple[Any, dict[str, str], bool]:
    """The `tokenizers.Tokenizer` of a tokenizer.json, a folder or a Hugging Face name; the settings
    KEPT; and whether the two texts of a pair have token types of their own.

    Where the files beside a tokenizer.json name a class of transformers, or the type of a model,
    that class says where spaces come, and about case and accents, if it changes nothing else; else
    the file is taken as it is, unlike in transformers, whose class for SmolLM2 parts no digits.

    Raises:
      DataError: there is no tokenizer, it is damaged, or `check` refuses it.
    """
    file = pathlib.Path(source)
    if not file.is_file():
        file = (file if file.is_dir() else _downloaded(source)) / TOKENIZER
    folder = file.parent
    _check_settings(folder)
    if not file.is_file():
        return _by_transformers(folder, source)
    backend = _from_file(file)
    inputs = _settings(folder).get("model_input_names")
    config, has_types = settings(folder), not isinstance(inputs, list) or TYPES in inputs
    if file.name == TOKENIZER and _names_class(folder):
        try:
            taken, config, has_types = _by_transformers(folder, source)
            if _steps(backend) == _steps(taken):
                backend.normalizer, backend.pre_tokenizer = taken.normalizer, taken.pre_tokenizer
        except DataError as error:
            _log.info("%s: transformers cannot read it by its class: %s", file, error)
    return backend, config, has_types


def versions() -> dict[str, str]:
    """On what it depends, besides the files, as which tokens a text is read."""
    return {"rag_jax": WAY, **{name: importlib.metadata.version(name)
                               for name in ("transformers", "tokenizers")}}


def _downloaded(name: str | pathlib.Path) -> pathlib.Path:
    """The folder with the tokenizer of a Hugging Face name."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(
            str(name), allow_patterns=[*FILES, "config.json"]))
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        raise _none(name, str(error)) from None


def _from_file(file: pathlib.Path) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json."""
    import tokenizers

    size = file.stat().st_size
    if size > SIZE_LIMIT:
        raise DataError(f"{file}: {size} bytes; a tokenizer.json has at most {SIZE_LIMIT}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:
        raise _translated(error, file) from None
    check(backend, file)
    return backend


def _steps(backend: Any) -> list[str]:
    """What a tokenizer does with a text, in order, but for spaces and FREE."""
    parts = [part.__getstate__() for part in (backend.normalizer, backend.pre_tokenizer) if part]
    return [type(backend.model).__name__, *(
        json.dumps({name: each for name, each in value.items() if name not in FREE}, sort_keys=True)
        for part in parts for kind, value in _parts(json.loads(part))
        if kind != "Sequence" and not _writes_spaces(value))]


def _writes_spaces(part: Mapping[str, Any]) -> bool:
    """Whether a part puts a space, or another sign for spaces, and parts no words."""
    written = part.get("content", part.get("prepend", part.get("replacement")))
    replaced = "".join(part.get("pattern", {}).values())
    return written in ("▁", " ") and not replaced.strip(" {2,}") and not part.get("split")


def _names_class(folder: pathlib.Path) -> bool:
    """Whether the files of a folder say which class of transformers reads its tokenizer."""
    model = _json(folder / "config.json")
    return any((_settings(folder).get("tokenizer_class"), model.get("tokenizer_class"),
                model.get("model_type")))


def _by_transformers(folder: pathlib.Path, source: str | pathlib.Path
                     ) -> tuple[Any, dict[str, str], bool]:
    """What transformers makes of a folder, which messages call `source`."""
    files = [name for name in VOCABULARIES if (folder / name).is_file()]
    if not files:
        raise _none(source, f"there is none of {', '.join(VOCABULARIES)}")
    if OTHERS in _settings(folder):
        raise _none(source, f"its {SETTINGS} names others, as {OTHERS}")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is missing
    # While one thread imports it, `import` would give others a module without its classes.
    transformers = importlib.import_module("transformers")
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(
            str(folder), config=_config(folder, files), trust_remote_code=False,
            mistral_format=False)
        backend = loaded.backend_tokenizer
    except BaseException as error:  # the library's many readers raise errors of any kind
        if not _is_of_library(error):
            raise
        reason = str(error) or type(error).__name__
        pieces = [name for name in files if name.endswith(".model")]
        if pieces and importlib.util.find_spec("sentencepiece") is None:
            reason = f"pip install sentencepiece, which reads its {' and '.join(pieces)}"
        raise _none(source, reason) from None
    check(backend, source)
    config = {name: getattr(loaded, name, None) for name in KEPT}
    if isinstance(config["chat_template"], dict):  # several, by their names
        config["chat_template"] = config["chat_template"].get("default")
    return backend, _kept(config), TYPES in loaded.model_input_names


def _config(folder: pathlib.Path, files: Sequence[str]) -> Any:
    """What decides the class of a tokenizer, as transformers' configuration of its model: the type
    of the model and the class that it names. All its fields would be checked, too."""
    transformers = importlib.import_module("transformers")
    model = _json(folder / "config.json")
    kind, named = model.get("model_type"), model.get("tokenizer_class")
    if not _names_class(folder):
        kind = next((kind for name, kind in MODEL_TYPES.items() if name in files), None)
    if kind in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(kind, tokenizer_class=named)
    return transformers.PreTrainedConfig(tokenizer_class=named)


def _none(source: str | pathlib.Path, reason: str) -> DataError:
    return DataError(
        f"no tokenizer at {str(source)!r}: expected a tokenizer.json, a folder with one, or a "
        f"Hugging Face name that is cached or can be downloaded ({' '.join(reason.split())[:300]})")


def _check_settings(folder: pathlib.Path) -> None:
    """Raises DataError for settings that transformers would read for minutes, as it compares each
    special token with all others, or that do not fit into memory."""
    templates = [folder / TEMPLATE, *(folder / TEMPLATES).glob("*.jinja")]
    size = sum(file.stat().st_size for file in templates if file.is_file())
    if size > SETTINGS_LIMIT:
        raise DataError(f"{folder}: {size} bytes of chat templates ({TEMPLATE}, {TEMPLATES}); they "
                        f"have at most {SETTINGS_LIMIT}")
    contents = [_json(folder / name) for name in (SETTINGS, *MORE)]
    count = sum(len(content) + sum(len(value) for value in content.values()
                                   if isinstance(value, (list, dict))) for content in contents)
    if count > ENTRIES_LIMIT:
        raise DataError(f"{folder}: {count} entries in {SETTINGS} and {' and '.join(MORE)}; a "
                        f"tokenizer has at most {ENTRIES_LIMIT}")


def settings(folder: pathlib.Path) -> dict[str, str]:
    """The names of special tokens, and the chat_template, in the files beside a tokenizer.json."""
    config = _settings(folder)
    if (folder / TEMPLATE).is_file():
        config["chat_template"] = _text(folder / TEMPLATE)
    return _kept(config)


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
                                "for ever; known are those of XLM-R, Qwen, Llama 3 and Tekken")
            growing += kind in GROWING
            content = value.get("content", value.get("prepend", ""))
            if growing > GROWTH_LIMIT or kind in GROWING and len(content) > CONTENT_LIMIT:
                raise DataError(f"{source}: its {name} replaces by too much: more than "
                                f"{GROWTH_LIMIT} replacements, or longer than {CONTENT_LIMIT}")
    try:
        vocabulary, added = backend.get_vocab(), backend.get_added_tokens_decoder()
        count, largest = backend.get_vocab_size(), max(vocabulary.values(), default=0)
        ids = backend.encode_batch([PROBE], add_special_tokens=False)[0].ids
        backend.decode(ids)
    except BaseException as error:
        raise _translated(error, source) from None
    if all(i in added or not token.strip("▁") for token, i in vocabulary.items()):
        raise DataError(f"{source}: its tokens are added ones alone: the vocabulary is missing, or "
                        "in another form than that of its class")
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
    """The error to raise for one that came while a tokenizer was read or tried."""
    return DataError(f"{source}: damaged, or no tokenizer ({str(error)[:200]}); take it from its "
                     "source again") if _is_of_library(error) else error


def _is_of_library(error: BaseException) -> bool:
    """Whether an error is one of the library, which raises Exception itself, or a panic of Rust,
    which is not even an Exception; else it is an interruption."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
