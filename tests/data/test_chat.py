"""Chat templates of strangers: what they make, and where they are stopped."""

import pytest

from rag_jax.data import chat
from rag_jax.errors import DataError

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def rendered(template, **limits):
    with pytest.MonkeyPatch.context() as patched:
        for name, value in limits.items():
            patched.setattr(chat, name, value)
        return chat.rendered(template, "Größe?", "Lima",
                             (("bos_token", "<s>"), ("eos_token", "</s>")))


def test_a_template_renders_the_messages_and_the_tokens():
    template = ("{{ bos_token }}{% for m in messages if m.content %}{{ m.role }}: {{ m.content }}"
                "{{ eos_token }}{% endfor %}")
    assert rendered(template) == "<s>user: Größe?</s>assistant: Lima</s>"


@pytest.mark.parametrize("template, limits, said", [
    (LOOP, {"CPU_SECS": 0}, "more than 0 seconds"),
    ("{{ 'a' * 10**6 }}", {}, "it makes 1000000 letters"),
    ("{{ 'a' * 3 * 10**9 }}", {"BYTES": 2 * 2**30}, "MemoryError"),
    ("{{ raise_exception('no system role') }}", {}, "no system role"),
    ("", {"_RENDER": "print('a warning'); raise SystemExit('no jinja')"}, "no jinja"),
])
def test_a_template_that_runs_on_or_fails_is_refused_with_its_reason(template, limits, said):
    """In this process it would take the command with it: range is bounded, loops in it are not."""
    with pytest.raises(DataError, match=f"chat_template cannot be used .*{said}.*=prompt"):
        rendered(template, **limits)
