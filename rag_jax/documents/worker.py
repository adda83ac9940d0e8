"""The child process that reads documents, so that a hostile file harms no other process.

    python -m rag_jax.documents.worker MEMORY_BYTES SECONDS

For each line {"name", "bytes"} on its input, followed by so many bytes of content, it writes a
line: the document's record, or {"unreadable": why}. It ends if a file takes more processor time
than SECONDS, even if the parent process is gone.
"""

import contextlib
import json
import math
import os
import sys
import time

from rag_jax.documents.document import Unreadable
from rag_jax.documents.read import read_content


def main() -> None:
    """Reads and answers until the input ends."""
    _limit_memory(int(sys.argv[1]))
    seconds = float(sys.argv[2])
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer
    while line := source.readline():
        asked = json.loads(line)
        content = source.read(asked["bytes"])
        _limit_time(seconds)
        try:
            answer = read_content(asked["name"], content).record()
        except Unreadable as error:
            answer = {"unreadable": str(error)}
        except MemoryError:
            answer = {"unreadable": "to read it takes too much memory"}
        except Exception as error:  # of any kind, from the libraries
            answer = {"unreadable": f"it is damaged ({type(error).__name__}: {error!s:.200})"}
        text = json.dumps(answer, ensure_ascii=False)
        answers.write(text.encode("utf-8", "replace") + b"\n")
        answers.flush()


def _limit_memory(most: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows, or a lower limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(more: float) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + more), most))


if __name__ == "__main__":
    main()
