"""Compiles the programs of a configuration for devices that this machine lacks, such as TPUs:
`python -m rag_jax.compile_report --config=FILE --topology=v5e:2x4`.

Prints for every program its memory, work and communication per chip, and whether it fits. Nothing
is run and no parameter is created; architectures are those of config.model, and pretrained weights
are not read. Ends with status 1 if a program does not fit.
"""

import argparse
import pathlib
from collections.abc import Sequence

from rag_jax import files
from rag_jax.cli import flags
from rag_jax.config import ConfigError


def main(argv: list[str] | None = None) -> str | None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    parser = flags.make_parser("compile_report", __doc__)
    parser.add_argument("--topology", default="v5e:2x4", metavar="NAME",
                        help="v5e:2x4, v4:2x2x4, ... (needs libtpu), or cpu:8 for so many virtual "
                        "CPU devices (default: %(default)s)")
    parser.add_argument("--programs", metavar="KIND,...", help="some of train, evaluate, decode, "
                        "embed, search (default: all)")
    parser.add_argument("--passages", type=int, default=0, metavar="N",
                        help="passages of an index on the devices, for search and for "
                        "config.retrieval.where=device")
    parser.add_argument("--remat", metavar="POLICY,...", help="compile training with each of "
                        "these (none, dots, narrow, full) in place of the configuration's, and "
                        "name the fastest that fits")
    parser.add_argument("--source_tokens", type=int, default=0, metavar="N",
                        help="training: mean tokens of a generator input of a batch; inputs are "
                        "then packed (default: all have config.data.max_source_length, the most "
                        "that training can meet)")
    parser.add_argument("--memory_gib", type=float, metavar="GIB",
                        help="memory of a chip (default: that of the topology)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options, config = flags.parse_with_config(parser, argv, several=False)

    from rag_jax import parallel
    from rag_jax.aot import chips, programs, report

    kinds = options.programs.split(",") if options.programs else programs.KINDS
    programs.check_names("--programs", kinds, programs.KINDS)
    _check_values(options, kinds, config.retrieval.where == "device")
    devices = chips.devices_of(options.topology)
    chip = chips.CHIPS.get(devices[0].device_kind)
    memory = chip and chip.memory
    if options.memory_gib is not None:
        memory = options.memory_gib * chips.GIB
    mesh, hosts = parallel.make_mesh(config.mesh, devices), chips.hosts_of(devices)
    shape = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    print(f"{options.topology}: {len(devices)} x {devices[0].device_kind} on {hosts} host(s), "
          f"mesh {shape}", flush=True)
    for line in programs.undivided(config, mesh):
        print(line, flush=True)
    needs = []
    for program in programs.programs(
            config, mesh, hosts, options.passages, kinds, options.source_tokens,
            options.remat.split(",") if options.remat else ()):
        needs.append(report.measure(program, len(devices)))
        print(f"compiled {program.name} in {needs[-1].secs:.0f} s", flush=True)
    print("\n" + report.tables(needs, chip, memory))
    chosen = report.fastest(needs, chip, memory)
    for one in chosen.values():
        print(f"\nthe fastest that fits: {one.name}")
    if options.json:
        record = report.as_json(needs, options.topology, len(devices), chip, memory)
        files.write_json(pathlib.Path(options.json), record, aside=True)
    too_big = [one.name for one in needs
               if not one.fits(memory) and report.task(one.name) not in chosen]
    return f"does not fit: {', '.join(too_big)}" if too_big else None


def _check_values(options: argparse.Namespace, kinds: Sequence[str], on_devices: bool) -> None:
    for name, most in (("passages", 2**31 - 1), ("source_tokens", 2**31 - 1),
                       ("memory_gib", 2**20)):
        if not 0 <= (getattr(options, name) or 0) <= most:
            raise ConfigError(f"--{name}={getattr(options, name)}: must be from 0 to {most}")
    for name, readers in (("remat", ["train"]), ("source_tokens", ["train"]),
                          ("passages", ["search", "train"][:1 + on_devices])):
        if getattr(options, name) and not set(readers) & set(kinds):
            raise ConfigError(f"--{name}: changes nothing in --programs={options.programs}; it is "
                              f"for {' and '.join(readers)}")
    if options.json:
        files.check_place(pathlib.Path(options.json))
