"""Writes tests/hub/goldens/*.npz from transformers: `python tests/hub/make_goldens.py [NAME ...]`
(needs the [parity] extra). A file per case: config.json, weights, inputs, outputs, gradients."""

import json
import pathlib
import sys
import tempfile

import numpy as np
import safetensors.numpy

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))


def packed(name: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One array of all values, and names and shapes as JSON: half the size of single entries."""
    shapes = {k: list(v.shape) for k, v in tensors.items()}
    values = np.concatenate([v.astype(np.float32).ravel() for v in tensors.values()])
    return {name: values, f"{name}_shapes": np.array(json.dumps(shapes))}


def main() -> None:
    import reference

    folder = HERE / "goldens"
    folder.mkdir(exist_ok=True)
    for name, case in reference.CASES.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
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
    main()
