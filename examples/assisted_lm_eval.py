"""lm-eval's command line, whose kind of model `hf-assisted` is `hf` with an assistant attached:
`python assisted_lm_eval.py run --model hf-assisted ...`. Needs the `ecosystem` extra.
"""

from __future__ import annotations

from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from hf_retrieval_assist import OutputMemory, SamAssistant, attach

assistant = SamAssistant(memory=OutputMemory())


@register_model("hf-assisted")
class AssistedLM(HFLM):
    """A model that lm-eval loads, with the assistant attached."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        attach(self.model, assistant)


if __name__ == "__main__":
    cli_evaluate()
    print(assistant.stats)
