"""Folders of sentence-transformers: what they say of pooling that a DPR tower does not compute."""

import pathlib
import reprlib
from typing import Any

from rag_jax.hub.stored import HubError, read_json, read_json_value

FILES = ["modules.json", "*_Pooling/config.json", "config_sentence_transformers.json"]
REMEDY = ("vectors here are the last state of [CLS], compared by inner product. Take a model of "
          "that kind (DPR), or train one: config.retriever_warmup. To start training from its "
          "weights as they are, remove modules.json and config_sentence_transformers.json")


def check(folder: pathlib.Path) -> None:
    """Raises HubError where a folder asks for other vectors than [CLS], or another product."""
    modules = folder / "modules.json"
    if modules.is_file():
        listed = read_json_value(modules)
        if not isinstance(listed, list) or not all(isinstance(m, dict) for m in listed):
            raise HubError(f"{modules}: no list of modules: download it again")
        for module in listed:
            _check_module(folder, modules, module)
    settings = folder / "config_sentence_transformers.json"
    if settings.is_file():
        content = read_json(settings)
        product, prompts = content.get("similarity_fn_name"), content.get("prompts") or {}
        if product not in (None, "dot", "dot_product"):
            raise HubError(f"{settings}: similarity_fn_name = {reprlib.repr(product)}; {REMEDY}")
        if not isinstance(prompts, dict) or any(prompts.values()):
            raise HubError(f"{settings}: prompts = {reprlib.repr(prompts)} stand before its texts, "
                           f"and nothing does here; {REMEDY}")


def _check_module(folder: pathlib.Path, modules: pathlib.Path, module: dict[str, Any]) -> None:
    kind, path = module.get("type"), module.get("path")
    name = kind.rpartition(".")[2] if isinstance(kind, str) else reprlib.repr(kind)
    if name == "Transformer":
        return
    if name != "Pooling" or not isinstance(path, str) or pathlib.PurePath(path).name != path:
        raise HubError(f"{modules}: its vectors go through {name[:80]}, which is not supported; "
                       f"{REMEDY}")
    file = folder / path / "config.json"
    pooling = read_json(file)
    modes = {key.removeprefix("pooling_mode_") for key, value in pooling.items()
             if key.startswith("pooling_mode_") and value}
    if "pooling_mode" in pooling:
        modes.add(str(pooling["pooling_mode"]))
    if not modes <= {"cls", "cls_token"} or not modes:
        raise HubError(f"{file}: its pooling is {', '.join(sorted(modes)) or 'not said'}, which is "
                       f"not supported; {REMEDY}")
