"""Reads all of an index, a passage store or a workdir and compares it with its digests.

    python -m rag_jax.verify PATH

prints what was read and the names of damaged files, and ends with status 1 if there are any. Of a
workdir, the data, the indexes and the checkpoints are verified. Nothing is changed.
"""

import pathlib
import sys

from rag_jax.cli import flags
from rag_jax.visible import visible


def main(argv: list[str] | None = None) -> int:
    """Entry point; `argv` without the program's name, None = the process's arguments.

    Returns:
      1 if something is damaged, else 0.
    """
    parser = flags.make_parser("verify", __doc__)
    parser.add_argument("path", metavar="PATH", type=flags.local_folder,
                        help="folder of an index, a passage store or a workdir")
    options = parser.parse_intermixed_args(argv)

    from rag_jax.training.run import be_quiet
    from rag_jax.training.verifying import verify

    be_quiet()

    damaged = 0
    for part, size, damage in verify(pathlib.Path(options.path)):
        print(f"{visible(str(part))}: {'DAMAGED' if damage else 'sound'}, {size}", flush=True)
        for line in damage:
            print(f"  {visible(line)}", file=sys.stderr, flush=True)
        damaged += bool(damage)
    return 1 if damaged else 0
