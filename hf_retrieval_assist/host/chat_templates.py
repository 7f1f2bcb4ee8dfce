"""What a tokenizer's chat template writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def rendered_call(
    tokenizer: Any, tools: Sequence[Mapping[str, Any]], call: Mapping[str, Any], call_id: str
) -> str:
    """How a model would write a call of a tool, behind the beginning of its answer.

    Args:
        tokenizer: with a chat template. Whatever the template raises comes through.
        tools: that may be called, as `apply_chat_template` takes them.
        call: {"name": ..., "arguments": {...}}.
        call_id: nine characters, which some templates write.
    """
    render: Callable[..., str] = tokenizer.apply_chat_template
    options = {"tools": [*tools], "tokenize": False}
    asked = [{"role": "user", "content": "?"}]
    called = [{"type": "function", "function": call, "id": call_id}]
    answer = {"role": "assistant", "content": "", "tool_calls": called}
    before = render(asked, add_generation_prompt=True, **options)
    after = render([*asked, answer], **options)
    common = os.path.commonprefix([before, after])  # noqa: RUF071 - of characters, not of paths
    return after[len(common) :]
