"""Chat templates are programs that others wrote: they are rendered in a separate process, in the
sandbox of transformers, which denies files and Python, and with limits of time and memory."""

import functools
import json
import os
import subprocess
import sys

from rag_jax.errors import DataError

CPU_SECS, BYTES, LONGEST = 10, 4 * 2**30, 100_000  # limits of a rendering; of its result in letters
WALL_SECS = 300  # for a machine that is busy otherwise; CPU_SECS are counted on Linux and macOS
_RENDER = """
import contextlib, json, sys, time
from transformers.utils.chat_template_utils import render_jinja_template

given = json.load(sys.stdin)
with contextlib.suppress(ImportError, ValueError, OSError):  # where the system knows no such limits
    import resource
    secs = int(time.process_time()) + 1 + given.pop("cpu_secs")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (secs, secs))
    resource.setrlimit(resource.RLIMIT_AS, (given["bytes"], given["bytes"]))
try:
    text = render_jinja_template(
        conversations=[given["messages"]], chat_template=given["template"], **given["names"])[0][0]
    found = {"text": text} if len(text) <= given["longest"] else {
        "error": f"it makes {len(text)} letters of a question and an answer"}
except Exception as error:
    found = {"error": f"{type(error).__name__}: {error}"[:500]}
print(json.dumps(found))
"""


@functools.cache
def rendered(template: str, question: str, answer: str, names: tuple[tuple[str, str], ...]) -> str:
    """The text that a chat template makes of a user's message and its answer.

    Args:
      template: in the language of jinja.
      question, answer: the messages.
      names: pairs of a name that it may use, such as bos_token, and its text.

    Raises:
      DataError: its error, or that it takes too long, too much memory or too many letters.
    """
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    given = {"template": template, "messages": messages, "cpu_secs": CPU_SECS, "bytes": BYTES,
             "longest": LONGEST, "names": dict(names)}
    # Threads of numpy's library would reserve more memory than the limit leaves.
    alone = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _RENDER], input=json.dumps(given), text=True,
            encoding="utf-8", capture_output=True, timeout=WALL_SECS, env={**os.environ, **alone})
        lines = done.stdout.splitlines()[-1:] if done.returncode == 0 else []
    except subprocess.TimeoutExpired:
        done, lines = None, []
    result = json.loads(lines[0]) if lines else {"error": _failure(done)}
    if "error" in result:
        raise DataError(f"the tokenizer's chat_template cannot be used ({result['error']}); set "
                        "config.data.source_format=prompt")
    return result["text"]


def _failure(done: subprocess.CompletedProcess | None) -> str:
    """Why the process gave no result; None = it was stopped after WALL_SECS."""
    if done is not None and done.returncode > 0:  # before the template: transformers, say
        return done.stderr.strip().rpartition("\n")[2][:500]
    return f"it takes more than {CPU_SECS} seconds, or {BYTES} bytes, to render"
