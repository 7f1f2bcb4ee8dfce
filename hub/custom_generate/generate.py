"""`model.generate(..., custom_generate="...", trust_remote_code=True)`, with retrieved drafts."""

from weakref import WeakKeyDictionary

from hf_retrieval_assist import OutputMemory, SamAssistant

PRESETS = {
    "sam": SamAssistant,
    "suffix": lambda: SamAssistant(memory=OutputMemory()),
}

# What was learnt from a model's calls helps its later ones, and goes with the model.
_assistants = WeakKeyDictionary()


def generate(model, drafts="sam", **arguments):
    """What `generate` without `custom_generate` returns, in fewer forwards.

    Args:
        model: a transformers model.
        drafts: "sam" drafts from the text itself, "suffix" also from what the model wrote in
            earlier calls of this process.
        **arguments: of `generate`.

    Raises:
        ValueError: other drafts.
    """
    if drafts not in PRESETS:
        raise ValueError(f"drafts: expected one of {sorted(PRESETS)}, got {drafts!r}")
    assistants = _assistants.setdefault(model, {})
    if drafts not in assistants:
        assistants[drafts] = PRESETS[drafts]()
    given = {name: value for name, value in arguments.items() if value is not None}
    # The class's: beside a model's own weights this function is what the model's `generate` calls.
    return type(model).generate(model, **given, assistant=assistants[drafts])
