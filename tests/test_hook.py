"""The `assistant=` keyword: put on, taken off, and refusing what it cannot serve."""

import functools
import inspect
import os
import subprocess
import sys
import warnings

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

import hf_retrieval_assist
from hf_retrieval_assist import Datastore, SamAssistant, attach, detach
from hf_retrieval_assist.papers import Rest
from hf_retrieval_assist.plugins import paths

from .support.lossless import PROMPT
from .support.tiny_models import VOCAB

LENGTH = {"max_new_tokens": 6}


@pytest.fixture
def reinstalled():
    yield
    hf_retrieval_assist.install()


def test_uninstall_and_install(model, reinstalled):
    """Both may be called again and again; the wrapper looks like `generate`."""
    for _ in range(2):
        hf_retrieval_assist.install()
        wrapper = GenerationMixin.generate
        hf_retrieval_assist.install()
        assert GenerationMixin.generate is wrapper
        hf_retrieval_assist.uninstall()
        original = GenerationMixin.generate
        hf_retrieval_assist.uninstall()
        assert GenerationMixin.generate is original is not wrapper
    assert (wrapper.__doc__, wrapper.__name__) == (original.__doc__, original.__name__)
    assert inspect.signature(wrapper) == inspect.signature(original)
    with pytest.raises((TypeError, ValueError), match="assistant"):
        model.generate(PROMPT, assistant=SamAssistant(), **LENGTH)
    plain = model.generate(PROMPT, **LENGTH)
    assert torch.equal(plain, model.generate(PROMPT, custom_generate=SamAssistant(), **LENGTH))
    hf_retrieval_assist.install()
    assert torch.equal(plain, model.generate(PROMPT, assistant=SamAssistant(), **LENGTH))


METHODS = ("generate", *paths("methods"))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("decorated", ["as it is", "by others"])
def test_what_callers_find_below_a_method_stays(name, decorated, reinstalled, monkeypatch):
    """Gradients go through the function below transformers' `no_grad`, whose name it is."""
    hf_retrieval_assist.uninstall()
    original = getattr(GenerationMixin, name)
    with monkeypatch.context() as patched:
        if decorated == "by others":  # who need not say what they decorate
            original = lambda *args, below=original, **options: below(*args, **options)  # noqa: E731
            patched.setattr(GenerationMixin, name, original)
        hf_retrieval_assist.install()
        wrapper = getattr(GenerationMixin, name)
        assert wrapper is not original
        assert getattr(wrapper, "__wrapped__", None) is getattr(original, "__wrapped__", None)
        assert inspect.signature(wrapper) == inspect.signature(original)
        hf_retrieval_assist.uninstall()
        assert getattr(GenerationMixin, name) is original


def test_a_wrapper_put_on_after_ours_survives_uninstall(model, reinstalled, monkeypatch):
    ours, plain = GenerationMixin.generate, model.generate(PROMPT, **LENGTH)
    calls = []

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        calls.append(1)
        return ours(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", theirs)
    hf_retrieval_assist.uninstall()
    assert GenerationMixin.generate is theirs
    assert torch.equal(plain, model.generate(PROMPT, **LENGTH))
    with pytest.raises((TypeError, ValueError), match="assistant"):
        model.generate(PROMPT, assistant=SamAssistant(), **LENGTH)
    assistant = SamAssistant()
    hf_retrieval_assist.install()
    assert GenerationMixin.generate is theirs
    assert torch.equal(plain, model.generate(PROMPT, assistant=assistant, **LENGTH))
    assert (len(calls), assistant.stats.total.calls) == (3, 1)


@pytest.mark.parametrize("installed", [True, False])
def test_what_transformers_warns_of_names_the_callers_line_once(
    model, reinstalled, monkeypatch, installed
):
    """Whichever way a call takes."""
    hf_retrieval_assist.uninstall()
    generate, assistant = GenerationMixin.generate, SamAssistant(budget=2)

    @functools.wraps(generate)
    def that_warns(self, *args, old, **options):
        warnings.warn(f"old: {old}", FutureWarning, stacklevel=2)
        return generate(self, *args, **options)

    ways = [
        lambda: model.generate(PROMPT, old=0, **LENGTH),
        lambda: functools.partial(model.generate, old=1)(PROMPT, **LENGTH),
        lambda: model.generate(PROMPT, old=2, custom_generate=assistant, **LENGTH),
    ]
    with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", FutureWarning)
        patched.setattr(GenerationMixin, "generate", that_warns)
        hf_retrieval_assist.install()
        if installed:
            attach(model, assistant)
            ways += [
                lambda: model.generate(PROMPT, old=3, assistant=assistant, **LENGTH),
                lambda: model.generate(PROMPT, old=4, num_beams=2, **LENGTH),
            ]
        else:
            hf_retrieval_assist.uninstall()
        for way in ways * 2:
            way()
        detach(model)
        hf_retrieval_assist.uninstall()
    found = [(one.filename, one.lineno) for one in caught if one.category is FutureWarning]
    assert found == [(__file__, way.__code__.co_firstlineno) for way in ways]


def test_refuses_an_assistant_in_a_configuration(model, monkeypatch):
    config = GenerationConfig(assistant=SamAssistant(), **LENGTH)
    message = "^assistant: expected none in a generation configuration, got a SamAssistant"
    for arguments, options in (((), {"generation_config": config}), ((config,), {}), ((), LENGTH)):
        if options is LENGTH:
            monkeypatch.setattr(model.generation_config, "assistant", SamAssistant(), raising=False)
        with pytest.raises(ValueError, match=message):
            model.generate(PROMPT, *arguments, **options)


REFUSED = [
    {"num_beams": 3},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"dola_layers": "high"},
    {"prompt_lookup_num_tokens": 3},
    {"cache_implementation": "paged"},
    {"cache_implementation": "quantized"},
]


@pytest.mark.parametrize("keyword", ["assistant", "custom_generate"])
@pytest.mark.parametrize("place", ["call", "configuration", "model"])
@pytest.mark.parametrize("settings", REFUSED, ids=str)
def test_refuses_other_ways_of_decoding(model, settings, place, keyword, monkeypatch):
    options = settings | LENGTH
    if place == "configuration":
        options = {"generation_config": GenerationConfig(pad_token_id=0, **options)}
    elif place == "model":
        for option, value in settings.items():
            monkeypatch.setattr(model.generation_config, option, value)
        options = LENGTH
    with pytest.raises(ValueError, match=next(iter(settings))):
        model.generate(PROMPT, **{keyword: SamAssistant()}, **options)


@pytest.mark.parametrize("name", ["assistant_model", "custom_generate"])
def test_refuses_a_second_one_that_drafts(model, name):
    other = model if name == "assistant_model" else SamAssistant()
    with pytest.raises(ValueError, match=name):
        model.generate(PROMPT, assistant=SamAssistant(), **{name: other}, **LENGTH)


@pytest.mark.parametrize("assistant", ["sam", SamAssistant, 3])
def test_refuses_what_is_no_assistant(model, assistant):
    with pytest.raises(TypeError, match=r"^assistant: expected an Assistant, got"):
        model.generate(PROMPT, assistant=assistant, **LENGTH)
    with pytest.raises(TypeError, match=r"^assistant: expected an Assistant, got"):
        attach(model, assistant)


def test_refuses_corpora_of_another_vocabulary(model, tmp_path):
    store = Datastore.build([[1, 2, 3]], tmp_path / "store", vocab_size=VOCAB + 5, progress=False)
    for assistant, message in (
        (SamAssistant(corpus=[[1, 2], [3, VOCAB]]), f"^corpus: .*{VOCAB}.*{VOCAB}"),
        (Rest(store), "vocab"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(PROMPT, assistant=assistant, **LENGTH)


@pytest.mark.parametrize("option", [{"stop_strings": "x"}, {"token_healing": True}])
def test_misses_the_tokenizer(model, option):
    """The caller's configuration is left as it is."""
    config = GenerationConfig(do_sample=False, pad_token_id=0, **option, **LENGTH)
    before = config.to_dict()
    for options in (option | LENGTH, {"generation_config": config}):
        expected = f"^{next(iter(option))}: expected the model's tokenizer"
        with pytest.raises(ValueError, match=expected):
            model.generate(PROMPT, assistant=SamAssistant(), **options)
    assert config.to_dict() == before


def test_stop_strings_of_the_model_are_left_to_transformers(model, monkeypatch, told):
    monkeypatch.setattr(model.generation_config, "stop_strings", ["x"])
    assistant = SamAssistant()
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        model.generate(PROMPT, assistant=assistant, **LENGTH)
    assert "decoding without the assistant" in told.text
    assert assistant.stats.total.calls == 0


# Run in a process of its own, where nothing has been imported.
LAZY = """
import inspect, sys
import hf_retrieval_assist.memory.output_memory, hf_retrieval_assist.drafters.suffix
assert "transformers" not in sys.modules
from transformers import GenerationMixin
own = set(sys.modules)
original = GenerationMixin.generate
import hf_retrieval_assist
assert GenerationMixin.generate is original
exec(sys.argv[1])
assert GenerationMixin.generate is not original
assert "assistant" in inspect.signature(GenerationMixin.generate, follow_wrapped=False).parameters
late = {"pydivsufsort", "sentencepiece", "rich", "matplotlib", "datasets"}
assert not late & set(sys.modules) - own
hf_retrieval_assist.uninstall()
assert all(getattr(hf_retrieval_assist, name) for name in hf_retrieval_assist.__all__)
assert GenerationMixin.generate is original
"""


# Names of the package, and of a module.
NAMED = ("hf_retrieval_assist.SamAssistant", "from hf_retrieval_assist.presets import SamAssistant")


@pytest.mark.slow
@pytest.mark.parametrize("used", NAMED)
def test_generate_gets_its_keyword_with_the_first_name_that_is_used(used, tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", LAZY, used], check=True, env=environment)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        hf_retrieval_assist.nothing  # noqa: B018
