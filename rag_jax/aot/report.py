"""Compiles programs and reports what each needs of a chip."""

import dataclasses
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import jax

from rag_jax.aot import costs, programs
from rag_jax.aot.chips import GIB, Chip
from rag_jax.aot.costs import Collective
from rag_jax.aot.programs import Program
from rag_jax.text_table import print_table

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Needs:
    """What one program needs of every chip; all figures but `secs` are 0 if it did not compile.

    Attributes:
      name: the program's.
      arguments, temporaries: bytes.
      results: bytes of results that do not take the place of donated arguments.
      code: bytes of the program.
      unrounded: bytes of parameters that are kept beside the arguments, which are rounded copies.
      flops: operations of matrix products, with those of rematerialisation.
      accessed: bytes from and to HBM, a lower bound.
      collectives: what is communicated.
      secs: how long it took to compile.
      problem: the compiler's message if it ran out of memory, or empty.
    """

    name: str
    arguments: int = 0
    temporaries: int = 0
    results: int = 0
    code: int = 0
    unrounded: int = 0
    flops: float = 0.0
    accessed: int = 0
    collectives: tuple[Collective, ...] = ()
    secs: float = 0.0
    problem: str = ""

    @property
    def memory(self) -> int:
        """All bytes together."""
        return self.arguments + self.temporaries + self.results + self.code + self.unrounded

    def fits(self, memory: float | None) -> bool:
        """Whether it compiled and fits `memory` bytes; None = the memory is not known."""
        return not self.problem and (memory is None or self.memory <= memory)

    def least_secs(self, chip: Chip) -> float:
        """A lower bound on the seconds of a run: operations at peak speed, or bytes at full
        bandwidth, whichever takes longer."""
        return max(self.flops / chip.peak, self.accessed / chip.bandwidth)


def measure(program: Program, devices: int, options: dict[str, Any] | None = None) -> Needs:
    """Compiles a program for `devices` chips with these options of the compiler."""
    began = time.monotonic()
    traced = program.jitted.trace(*program.arguments)
    try:
        compiled = traced.lower().compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Needs(program.name, secs=time.monotonic() - began, problem=_problem(str(error)))
    secs = time.monotonic() - began
    memory, module = compiled.memory_analysis(), costs.Module(compiled.as_text())
    return Needs(
        program.name, memory.argument_size_in_bytes, memory.temp_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.generated_code_size_in_bytes, sum(map(_bytes_on_device, program.unrounded)),
        costs.flops(traced.jaxpr.jaxpr) / devices, module.accessed(),
        tuple(module.collectives()), secs)


def _bytes_on_device(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def task(name: str) -> str:
    """A program's name without the policy of rematerialisation."""
    return name.partition(programs.POLICY)[0]


def fastest(needs: Sequence[Needs], chip: Chip | None, memory: float | None) -> dict[str, Needs]:
    """For each task that was compiled with several policies, the program that fits and has the
    smallest `least_secs`, or, for an unknown chip, the fewest operations.

    Tasks of which no program fits are left out.
    """
    of_tasks: dict[str, list[Needs]] = {}
    for one in needs:
        if task(one.name) != one.name and one.fits(memory):
            of_tasks.setdefault(task(one.name), []).append(one)
    return {name: min(several, key=lambda one: one.least_secs(chip) if chip else one.flops)
            for name, several in of_tasks.items()}


def _problem(message: str) -> str:
    """A short form of the compiler's message."""
    used = re.search(r"Used [\d.]+\w* of [\d.]+\w*", message)
    return f"out of memory: {used[0] if used else message.splitlines()[0]}"


def tables(programs: Sequence[Needs], chip: Chip | None, memory: float | None) -> str:
    """Tables of the memory, the work and the collectives of all programs, per chip."""
    rows, work, collectives = [], [], []
    for one in programs:
        fits = "no" if not one.fits(memory) else "yes" if memory else "-"
        if one.problem:
            rows.append([one.name, *[None] * 6, f"{fits}: {one.problem}", round(one.secs)])
            continue
        parts = (one.arguments, one.temporaries, one.results, one.code, one.unrounded, one.memory)
        rows.append([one.name, *(part / GIB for part in parts), fits, round(one.secs)])
        least = None if chip is None else 1e3 * one.least_secs(chip)
        work.append([one.name, one.flops / 1e12, one.accessed / 1e9, least])
        for kind in dict.fromkeys(c.kind for c in one.collectives):
            same = [c for c in one.collectives if c.kind == kind]
            collectives.append([one.name, kind, sum(c.times for c in same),
                                sum(c.bytes for c in same) / MIB, _shortened(same[0].shape)])
    shown = [print_table(rows, ["GiB per chip", "arguments", "temporaries", "results", "code",
                                "unrounded", "together", "fits", "compile secs"])]
    if work:
        shown.append(print_table(work, ["work per chip", "TFLOP", "GB from and to HBM",
                                        "at least ms"]))
    if collectives:
        shown.append(print_table(collectives, ["program", "collective", "times", "MiB per chip",
                                               "largest"]))
    return "\n\n".join(shown)


def _shortened(shape: str, most: int = 48) -> str:
    return shape if len(shape) <= most else shape[: most - 3] + "..."


def as_json(programs: Sequence[Needs], topology: str, devices: int, chip: Chip | None,
            memory: float | None) -> dict[str, Any]:
    """The figures of `tables` without rounding, with every collective."""
    return {"topology": topology, "devices": devices, "memory": memory, "programs": [{
        **dataclasses.asdict(one), "collectives": [c._asdict() for c in one.collectives],
        "fits": one.fits(memory),
        "least_secs": None if chip is None else one.least_secs(chip)} for one in programs]}
