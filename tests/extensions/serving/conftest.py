import threading

import pytest
import transformers
from packaging.version import Version

# Earlier releases have another continuous batching, and what the server extends is not there.
OLD = Version(transformers.__version__) < Version("5.20")
collect_ignore_glob = ["test_*.py"] if OLD else []


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Of a model as `save_pretrained` leaves it."""
    from tests.support.served import learned

    return learned(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "side by side"])
def served(folder, request):
    from tests.support.served import serving

    with serving(folder, batching=request.param) as found:
        yield found


@pytest.fixture(scope="module")
def alone(folder):
    """One request after another, for what does not depend on it."""
    from tests.support.served import serving

    with serving(folder) as found:
        yield found


@pytest.fixture
def held(monkeypatch):
    """Forwards that wait until the event is set."""
    from transformers import Qwen2ForCausalLM

    plain = Qwen2ForCausalLM.forward
    going = threading.Event()
    going.set()
    going.waits, going.forwards = False, 0  # whether a forward does, and how many there were

    def forward(self, *arguments, **options):
        going.waits = not going.is_set()
        assert going.wait(30)
        going.forwards += 1
        return plain(self, *arguments, **options)

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", forward)
    yield going
    going.set()
