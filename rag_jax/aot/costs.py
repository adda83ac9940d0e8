"""What a program costs: operations from its jaxpr, memory traffic and collectives from its HLO.

XLA's own analysis counts the body of a loop once. Here it counts as often as the loop runs, or once
where this depends on the data, as in a search for answers.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend import core

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
         "ragged-all-to-all", "collective-broadcast")


def flops(jaxpr: Any) -> float:
    """Operations of all matrix products of a jaxpr, on all devices together; a multiply-add is 2.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, [flops(j) for j in _inner(eqn)]
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(
                left[axis] for axis in contracted)
        elif name == "cond":
            total += max(inner)
        elif name == "scan":
            total += eqn.params["length"] * sum(inner)
        elif name == "pallas_call":
            total += math.prod(eqn.params["grid_mapping"].grid) * sum(inner)
        elif name == "shard_map":
            total += sum(inner) * eqn.params["mesh"].size  # inside are the shapes of one device
        else:
            total += sum(inner)
    return total


def _inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs inside an equation."""
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part


class Collective(NamedTuple):
    """All collectives of one kind and one shape, as one chip runs them."""

    kind: str  # one of KINDS
    shape: str  # of the result, such as "f32[1024,4096]"
    times: int  # how often it runs
    bytes: int  # of all runs together: what the chip sends or what it receives, if that is more


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_NAMES = re.compile(r"%([\w.\-]+)")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)="
                     r"(%?[\w.\-]+)|branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?\s*[:=]\s*\{"?n"?\s*[:=]\s*"?(\d+)')
# Instructions that run other computations as they are, and not as one fusion.
_RUN_IN_PLACE = ("while", "call", "conditional", "async-start")
# Instructions that move nothing between HBM and chip by themselves.
_FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "iota",
         "partition-id", "replica-id", "optimization-barrier", "opt-barrier", *_RUN_IN_PLACE)
_ALIASES = ("bitcast", "reshape", "copy")  # within a fusion they store nothing
_SLICES = ("dynamic-slice", "gather", "slice")


class _Op(NamedTuple):
    """An instruction of a compiled program."""

    name: str
    result: str  # its type
    opcode: str
    given: str  # the text in its parentheses
    attributes: str  # the text after them
    operands: tuple[str, ...]  # their names

    @property
    def callees(self) -> list[str]:
        """The names of the computations that it calls."""
        named = " ".join(map(" ".join, _CALLED.findall(self.attributes)))
        return re.findall(r"[\w.\-]+", named)

    @property
    def repeated(self) -> bool:
        """Whether its result also contains its operands, as with most asynchronous starts."""
        return self.opcode.endswith("-start") and not self.opcode.startswith("all-reduce")


class _Computation:
    """The instructions of the whole program, of a loop's body, of a fusion or the like."""

    def __init__(self) -> None:
        self.ops: dict[str, _Op] = {}  # by name
        self.root: _Op | None = None  # whose result is that of the computation
        self.times = 0  # how often it runs

    @functools.cached_property
    def users(self) -> dict[str, list[_Op]]:
        """For the name of a value, the instructions that have it as an operand."""
        users: dict[str, list[_Op]] = {}
        for op in self.ops.values():
            for operand in dict.fromkeys(op.operands):
                users.setdefault(operand, []).append(op)
        return users

    @functools.cached_property
    def parameters(self) -> list[str]:
        """The names of its parameters, in order."""
        numbers = {int(op.given): op.name for op in self.ops.values() if op.opcode == "parameter"}
        return [numbers[place] for place in sorted(numbers)]

    def given(self, op: _Op) -> list[str]:
        """The types of an instruction's operands."""
        return [self.ops[operand].result for operand in op.operands]


def _size(type_text: str, everywhere: bool = True) -> int:
    """Bytes of a type, of all parts if it is a tuple; not `everywhere`: only of those in HBM."""
    total = 0
    for dtype, sizes, layout in _SHAPE.findall(type_text):
        if everywhere or not re.search(r"S\([1-9]", layout):  # S(0), or none, is HBM
            bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or [0])[0])
            total += math.prod(int(n) for n in sizes.split(",") if n) * bits // 8
    return total


class Module:
    """The computations of a compiled program, from its HLO text, and how often each runs."""

    def __init__(self, text: str):
        self.computations: dict[str, _Computation] = {}
        self.entry = ""
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self.computations[header[2]] = _Computation()
                self.entry = header[2] if header[1] else self.entry
            elif self.computations and (parts := _LINE.match(line)):
                root, *fields = parts.groups()
                op = _Op(*fields, tuple(_NAMES.findall(parts[5])))
                current.ops[op.name] = op
                current.root = op if root else current.root
        self._run(self.entry, 1)

    def _run(self, name: str, times: int) -> None:
        """Adds `times` runs to a computation, and as many as follow from it to those it calls."""
        computation = self.computations[name]
        computation.times += times
        for op in computation.ops.values():
            turns = self._trips(op) if op.opcode == "while" else 1
            for callee in op.callees:
                self._run(callee, times * turns)

    def _trips(self, loop: _Op) -> int:
        """How often the body of a loop runs, as XLA notes or as the condition of a scan, which
        counts from 0, says; 1 where neither is known."""
        if noted := _TRIPS.search(loop.attributes):
            return int(noted[1])
        condition = self.computations[re.search(r"condition=%?([\w.\-]+)", loop.attributes)[1]]
        end = condition.root
        limits = [condition.ops[name].given for name in end.operands
                  if condition.ops[name].opcode == "constant"]
        counts = end.opcode == "compare" and "direction=LT" in end.attributes and limits
        return int(limits[0]) if counts else 1

    def collectives(self) -> list[Collective]:
        """All collectives, those of equal kind and shape as one, by bytes in descending order."""
        times, moved, channels = Counter(), Counter(), set()
        for name, computation in self.computations.items():
            for op in computation.ops.values():
                kind = op.opcode.removesuffix("-start")
                if kind not in KINDS or not computation.times:
                    continue
                # In a TPU's program, every fusion that runs beside a collective contains it.
                if channel := re.search(r"channel_id=\d+", op.attributes):
                    if channel[0] in channels:
                        continue
                    channels.add(channel[0])
                if name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"  # on TPUs this is a fusion of an all-reduce and a slice
                given = sum(map(_size, computation.given(op)))
                got = _size(op.result) - given * op.repeated
                key = kind, " ".join(f"{d}[{s}]" for d, s, _ in _SHAPE.findall(op.result))
                times[key] += computation.times
                moved[key] += computation.times * max(given, got)
        return sorted((Collective(*key, times[key], moved[key]) for key in times),
                      key=lambda one: -one.bytes)

    def accessed(self) -> int:
        """Bytes that a chip moves from and to HBM: the operands and results of all instructions.

        Of an operand that is only sliced, the slices count; of a conditional, the branch with the
        fewest bytes.
        """
        return self._accessed(self.entry)

    def _accessed(self, name: str) -> int:
        """Bytes that one run of a computation moves."""
        computation, total = self.computations[name], 0
        for op in computation.ops.values():
            total += self._traffic(computation, op)
            if op.opcode in _RUN_IN_PLACE:
                inner = [self._accessed(callee) for callee in op.callees]
                turns = self._trips(op) if op.opcode == "while" else 1
                total += min(inner) if op.opcode == "conditional" else turns * sum(inner)
        return total

    def _traffic(self, computation: _Computation, op: _Op) -> int:
        """Bytes that an instruction moves, without those of the computations it runs in place."""
        if op.opcode in _FREE or op.opcode.endswith("-done"):
            return 0
        types = computation.given(op)
        given, got = [_size(each, False) for each in types], _size(op.result, False)
        if op.opcode in ("slice-start", "dynamic-slice-start"):
            return max(0, _size(op.result) - sum(map(_size, types)))
        if op.opcode.endswith("-start"):
            return sum(given) + max(0, got - sum(given) * op.repeated)
        if op.opcode == "fusion":
            fusion = self.computations[op.callees[0]]
            read = (self._read(fusion, name) for name in fusion.parameters)
            return max(0, got - _unwritten(fusion)) + sum(
                size if result else min(size, used)
                for size, (used, result) in zip(given, read, strict=True))
        if op.opcode in _SLICES:
            return 2 * got
        if op.opcode == "dynamic-update-slice":
            return 2 * given[1]
        return sum(given) + got

    def _read(self, fusion: _Computation, name: str) -> tuple[float, bool]:
        """How many bytes of a value a fusion reads (inf = all), and whether the fusion's result is
        this value, at most in another layout.

        A fusion with several results may pass a parameter on as one of them, or contain a
        collective that runs beside it and was counted where it started. Neither reads the value.
        """
        untouched = fusion.root.opcode == "tuple" and fusion.ops[name].opcode == "parameter"
        total, result = 0.0, name == fusion.root.name
        for user in fusion.users.get(name, ()):
            if untouched and (user is fusion.root or user.opcode in KINDS):
                continue
            if user.opcode in _SLICES and name == user.operands[0]:
                total += _size(user.result)
            elif user.opcode in _ALIASES:
                used, through = self._read(fusion, user.name)
                total, result = total + used, result or through
            elif user.opcode == "fusion":
                inner = self.computations[user.callees[0]]
                for operand, parameter in zip(user.operands, inner.parameters, strict=True):
                    if operand == name:
                        used, through = self._read(inner, parameter)
                        total += used + (self._read(fusion, user.name)[0] if through else 0)
            elif user.opcode != "dynamic-update-slice" or name != user.operands[0]:
                return math.inf, result
        return total, result


def _unwritten(fusion: _Computation) -> int:
    """Bytes of a fusion's result that it does not write: all but the update in an array that is
    updated in place, and what it passes on or has from a collective, as in `Module._read`."""
    total, several = 0, fusion.root.opcode == "tuple"
    for name in fusion.root.operands if several else (fusion.root.name,):
        op = fusion.ops[name]
        if several and op.opcode in ("parameter", *KINDS):
            total += _size(op.result, False)
            continue
        while op.opcode in _ALIASES:
            op = fusion.ops[op.operands[0]]
        if op.opcode == "dynamic-update-slice":
            total += _size(op.result) - _size(fusion.ops[op.operands[1]].result)
    return total
