"""Writes tests/hub/goldens from transformers and sentence-transformers: `python
tests/hub/make_goldens.py [NAME ...]` (needs the [parity] extra).

A file per case: config.json, weights, inputs, outputs, gradients; of sentence encoders the
folder itself, and the vectors of parity.py's texts."""

import json
import pathlib
import sys
import tempfile

import numpy as np
import safetensors.numpy

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


def packed(name: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One array of all values, and names and shapes as JSON: half the size of single entries."""
    shapes = {k: list(v.shape) for k, v in tensors.items()}
    values = np.concatenate([v.astype(np.float32).ravel() for v in tensors.values()])
    return {name: values, f"{name}_shapes": np.array(json.dumps(shapes))}


def write_sentences(folder: pathlib.Path, chosen: list[str]) -> None:
    import sentences

    folder.mkdir(exist_ok=True)
    for name in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            saved = pathlib.Path(scratch, name)
            vectors = sentences.vectors(sentences.build(sentences.CASES[name], saved))
            files = {f"files/{file.relative_to(saved).as_posix()}": np.frombuffer(
                file.read_bytes(), np.uint8) for file in sorted(saved.rglob("*"))
                if file.is_file() and file.name != "README.md"}
        np.savez_compressed(folder / f"{name}.npz", **vectors, **files)
        print(name, (folder / f"{name}.npz").stat().st_size, "bytes")


def main(*chosen: str) -> None:
    import reference
    import sentences

    folder = HERE / "goldens"
    for group in ("t5", "rerankers"):
        (folder / group).mkdir(parents=True, exist_ok=True)
    if asked := [name for name in sentences.CASES if not chosen or name in chosen]:
        write_sentences(folder / "sentences", asked)
    for name, case in reference.CASES.items():
        if chosen and name not in chosen:
            continue
        model = reference.build(case)
        record = reference.record(model, case, reference.make_inputs(case))
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            config = json.loads(pathlib.Path(saved, "config.json").read_text())
            weights = safetensors.numpy.load_file(pathlib.Path(saved, "model.safetensors"))
        config.pop("transformers_version", None)
        gradients = {k.removeprefix("gradients/"): record.pop(k) for k in list(record)
                     if k.startswith("gradients/")}
        np.savez_compressed(folder / f"{name}.npz", config=json.dumps(config), **record,
                            **packed("weights", weights), **packed("gradients", gradients))
        print(name, (folder / f"{name}.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
