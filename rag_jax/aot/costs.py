"""What a program costs: operations from its trace, traffic and collectives from its compiled text.

XLA's own analysis counts the body of a loop once. Here it counts as often as the loop runs; a loop
whose length depends on the data, as a search for answers, counts once.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend import core

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
         "ragged-all-to-all", "collective-broadcast")


def flops(jaxpr: Any) -> float:
    """Operations of all matrix products of a traced program on all devices; 2 a multiply-add."""
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
    """One kind of communication of one shape, on one chip."""

    kind: str
    shape: str  # of the result, such as "f32[1024,4096]"
    times: int
    bytes: int  # all times together; of what a chip gives and gets, the larger


class _Instruction(NamedTuple):
    name: str
    result: str  # its type
    opcode: str
    operands: tuple[str, ...]
    attributes: str


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)="
                     r"%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?\s*[:=]\s*\{"?n"?\s*[:=]\s*"?(\d+)')
_RUN_IN_PLACE = ("while", "call", "conditional", "async-start")  # what they call is no fusion
_FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "iota",
         "partition-id", "replica-id", "optimization-barrier", "opt-barrier", *_RUN_IN_PLACE)
_ALIASES = ("bitcast", "reshape", "copy")  # inside a fusion, where only the last result is stored


def _size(type_text: str, everywhere: bool = True) -> int:
    """Bytes of a type, all parts of a tuple together; else of what lies in HBM alone."""
    total = 0
    for dtype, sizes, layout in _SHAPE.findall(type_text):
        if everywhere or not re.search(r"S\([1-9]", layout):
            bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or [0])[0])
            total += math.prod(int(n) for n in sizes.split(",") if n) * bits // 8
    return total


class Module:
    """The computations of a compiled program, and how often each runs."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.roots: dict[str, str] = {}
        entry, here = None, None
        for line in text.splitlines():
            if header := _HEADER.match(line):
                here = header[2]
                self.computations[here] = {}
                entry = here if header[1] else entry
            elif here and (found := _LINE.match(line)):
                name, result, opcode, rest = found.groups()
                given, attributes = _split(rest)
                operands = tuple(re.findall(r"%([\w.\-]+)", given))
                self.computations[here][name] = _Instruction(
                    name, result, opcode, operands, f"({given}) {attributes}")
                if line.lstrip().startswith("ROOT"):
                    self.roots[here] = name
        self._users = {name: _users(body) for name, body in self.computations.items()}
        self.times: collections.Counter = collections.Counter()
        self._fused: set[str] = set()
        self._run(entry, 1, False)

    def _run(self, name: str, times: int, fused: bool) -> None:
        self.times[name] += times
        if fused:
            self._fused.add(name)
        for one in self.computations[name].values():
            turns = self._trips(one) if one.opcode == "while" else 1
            inside = fused or one.opcode not in _RUN_IN_PLACE
            for callee in _callees(one):
                self._run(callee, times * turns, inside)

    def _trips(self, loop: _Instruction) -> int:
        """How often a loop runs: as XLA notes it, or as its condition says (scans count from 0)."""
        if noted := _TRIPS.search(loop.attributes):
            return int(noted[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)[1]
        body = self.computations[condition]
        ends = body[self.roots[condition]]
        limits = [body[name] for name in ends.operands if body[name].opcode == "constant"]
        if ends.opcode == "compare" and "direction=LT" in ends.attributes and limits:
            return int(re.match(r"\((\d+)\)", limits[0].attributes)[1])
        return 1

    def collectives(self) -> list[Collective]:
        """All communication, equal kinds and shapes together, most bytes first."""
        found: dict[tuple[str, str], list[int]] = {}
        channels = set()  # TPUs write one collective into every fusion that runs beside it
        for name, body in self.computations.items():
            for one in body.values():
                kind = one.opcode.removesuffix("-start")
                channel = re.search(r"channel_id=(\d+)", one.attributes)
                if kind not in KINDS or not self.times[name] or (
                        channel and channel[1] in channels):
                    continue
                channels |= {channel[1]} if channel else set()
                if name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"  # as TPUs write it: a fusion of a sum and a slice
                given = sum(_size(body[operand].result) for operand in one.operands)
                got = _size(one.result)
                if one.opcode.endswith("-start") and kind != "all-reduce":
                    got -= given  # the result of a start holds its operands too
                shape = " ".join(f"{d}[{s}]" for d, s, _ in _SHAPE.findall(one.result))
                sums = found.setdefault((kind, shape), [0, 0])
                sums[0] += self.times[name]
                sums[1] += self.times[name] * max(given, got)
        listed = [Collective(*key, *sums) for key, sums in found.items()]
        return sorted(listed, key=lambda c: -c.bytes)

    def accessed(self) -> int:
        """Bytes between HBM and a chip: operands and results of all that runs, slices as such."""
        total = 0
        for name, body in self.computations.items():
            if self.times[name] and name not in self._fused:
                total += self.times[name] * sum(self._traffic(name, one) for one in body.values())
        return total

    def _traffic(self, computation: str, one: _Instruction) -> int:
        body = self.computations[computation]
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            return 0
        given = [_size(body[operand].result, False) for operand in one.operands]
        if one.opcode in ("slice-start", "dynamic-slice-start"):
            return max(0, _size(one.result) - sum(_size(body[o].result) for o in one.operands))
        if one.opcode.endswith("-start"):
            held = 0 if one.opcode.startswith("all-reduce") else sum(given)
            return sum(given) + max(0, _size(one.result, False) - held)
        if one.opcode == "fusion":
            (callee,) = _callees(one)
            parameters = self._parameters(callee)
            read = sum(size if self._passes(callee, parameters[place])
                       else min(size, self._read(callee, parameters[place]))
                       for place, size in enumerate(given))
            return read + self._written(callee, one)
        if one.opcode in ("dynamic-slice", "gather", "slice"):
            return 2 * _size(one.result, False)
        if one.opcode == "dynamic-update-slice":
            return 2 * given[1]
        return sum(given) + _size(one.result, False)

    def _parameters(self, computation: str) -> list[str]:
        numbered = [(int(one.attributes.partition(")")[0].lstrip("(")), one.name)
                    for one in self.computations[computation].values()
                    if one.opcode == "parameter"]
        return [name for _, name in sorted(numbered)]

    def _read(self, computation: str, name: str) -> float:
        """How many bytes of a value the instructions of a fusion use; inf = all of it.

        A fusion of several results may have the value among them, or a collective that runs beside
        it and has counted where it started: both leave the value where it is.
        """
        total, body = 0.0, self.computations[computation]
        root = body[self.roots[computation]]
        untouched = root.opcode == "tuple" and body[name].opcode == "parameter"
        for user in self._users[computation].get(name, ()):
            if untouched and (user is root or user.opcode in KINDS):
                continue
            if user.opcode in ("dynamic-slice", "gather", "slice") and name == user.operands[0]:
                total += _size(user.result)
            elif user.opcode in _ALIASES:
                total += self._read(computation, user.name)
            elif user.opcode == "fusion":
                (callee,) = _callees(user)
                inner = self._parameters(callee)
                for place in (p for p, operand in enumerate(user.operands) if operand == name):
                    total += self._read(callee, inner[place])
                    if self._passes(callee, inner[place]):
                        total += self._read(computation, user.name)
            elif user.opcode != "dynamic-update-slice" or name != user.operands[0]:
                return math.inf
        return total

    def _passes(self, computation: str, name: str) -> bool:
        """Whether a fusion's result is this value, laid out otherwise at most."""
        return name == self.roots[computation] or any(
            user.opcode in _ALIASES and self._passes(computation, user.name)
            for user in self._users[computation].get(name, ()))

    def _written(self, computation: str, fusion: _Instruction) -> int:
        """Bytes that a fusion writes: of an array updated in place, the update; nothing of what it
        hands on."""
        total, body = _size(fusion.result, False), self.computations[computation]
        root = body[self.roots[computation]]
        for name in root.operands if root.opcode == "tuple" else (root.name,):
            one = body[name]
            if root.opcode == "tuple" and one.opcode in ("parameter", *KINDS):
                total -= _size(one.result, False)  # as in _read
                continue
            while one.opcode in _ALIASES:
                one = body[one.operands[0]]
            if one.opcode == "dynamic-update-slice":
                total -= _size(one.result) - _size(body[one.operands[1]].result)
        return max(0, total)


def _split(rest: str) -> tuple[str, str]:
    """What follows an opcode's parenthesis, as (operands, attributes)."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter in "({") - (letter in ")}")
        if depth == 0:
            return rest[:place], rest[place + 1 :]
    return rest, ""


def _users(body: dict[str, _Instruction]) -> dict[str, list[_Instruction]]:
    users: dict[str, list[_Instruction]] = {}
    for one in body.values():
        for operand in dict.fromkeys(one.operands):
            users.setdefault(operand, []).append(one)
    return users


def _callees(one: _Instruction) -> list[str]:
    found = []
    for single, several in _CALLED.findall(one.attributes):
        found += [single] if single else re.findall(r"%?([\w.\-]+)", several)
    return found
