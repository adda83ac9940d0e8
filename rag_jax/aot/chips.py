"""Devices to compile for: TPU topologies, which need no TPUs, and virtual CPU devices."""

import importlib.metadata
import importlib.util
import os
import re
from typing import Any, NamedTuple

import jax

from rag_jax.config import ConfigError

GIB = 2**30


class Chip(NamedTuple):
    """A device of jax: a chip, or, in TPU v2 and v3, one of a chip's two cores."""

    memory: float  # bytes of HBM
    peak: float  # bfloat16 operations per second
    bandwidth: float  # bytes per second to and from HBM


# By jax's device_kind. Sources: cloud.google.com/tpu/docs/v3 (a chip has two cores), v4, v5e, v5p
# and v6e, "System architecture"; v2: Jouppi et al. 2020, "A domain-specific supercomputer for
# training deep neural networks", CACM 63(7), table 3. GPUs: NVIDIA's data sheets of the A100, H100
# and H200 (SXM), bfloat16 without sparsity.
CHIPS = {
    "TPU v2": Chip(8 * GIB, 23e12, 350e9),
    "TPU v3": Chip(16 * GIB, 61.5e12, 450e9),
    "TPU v4": Chip(32 * GIB, 275e12, 1200e9),
    "TPU v5 lite": Chip(16 * GIB, 197e12, 819e9),
    "TPU v5": Chip(95 * GIB, 459e12, 2765e9),
    "TPU v6 lite": Chip(32 * GIB, 918e12, 1638e9),
    "NVIDIA A100-SXM4-80GB": Chip(80e9, 312e12, 2039e9),
    "NVIDIA H100 80GB HBM3": Chip(80e9, 989e12, 3350e9),
    "NVIDIA H200": Chip(141e9, 989e12, 4800e9),
}


def devices_of(topology: str) -> list[Any]:
    """The devices of a topology such as "v5e:2x4", which need not exist, or of "cpu:8".

    Raises:
      ConfigError: libtpu is missing or knows no such topology, or this process has fewer CPU
        devices.
    """
    jax.config.update("jax_platforms", "cpu")
    kind, _, size = topology.partition(":")
    if kind == "cpu":
        return _cpus(topology, size)
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology={topology}: libtpu, which compiles for TPUs on any Linux machine, is not "
            f"installed: pip install --no-deps '{_libtpu_pin()}'")
    from jax.experimental import topologies

    for name, value in _NO_VM.items():
        os.environ.setdefault(name, value)
    try:
        return list(topologies.get_topology_desc(topology, "tpu", **_form(kind, size)).devices)
    except Exception as error:  # of several types, with the version of libtpu
        raise ConfigError(f"--topology={topology}: libtpu knows no such topology; examples are "
                          f"v4:2x2x1, v5e:2x4, v5p:2x2x2, v6e:4x4 ({error})") from None


# Without these values libtpu asks a TPU VM's metadata server, and complains if there is none.
_NO_VM = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8",
          "TPU_WORKER_HOSTNAMES": "localhost"}


def _form(kind: str, size: str) -> dict[str, Any]:
    """What the name of a topology does not say: the two cores of a v4 chip are one device; a host
    of v5e or v6e has up to eight chips."""
    if kind == "v4":
        return {"chip_config_name": "megacore"}
    if kind in ("v5e", "v6e") and re.fullmatch(r"\d+x\d+", size):
        width, height = map(int, size.split("x"))
        return {"chips_per_host_bounds": (min(width, 2), min(height, 4), 1)}
    return {}


def _cpus(topology: str, size: str) -> list[Any]:
    """`size` virtual CPU devices; ConfigError as `devices_of` says."""
    if not re.fullmatch(r"[1-9][0-9]{0,3}", size):
        raise ConfigError(f"--topology={topology}: expected cpu:COUNT, such as cpu:8")
    try:
        jax.config.update("jax_num_cpu_devices", int(size))
    except RuntimeError:
        pass  # jax has its devices already
    devices = jax.devices("cpu")
    if len(devices) < int(size):
        raise ConfigError(f"--topology={topology}: this process has {len(devices)} CPU devices")
    return devices[: int(size)]


def _libtpu_pin() -> str:
    """The requirement of libtpu that the extra `tpu` of the installed jax has."""
    pins = (re.match(r"libtpu\b[^;]*", line) for line in importlib.metadata.requires("jax") or ())
    return next((pin[0].strip().replace(" ", "") for pin in pins if pin), "libtpu")


def hosts_of(devices: list[Any]) -> int:
    """How many machines the devices belong to."""
    return len({device.process_index for device in devices})
