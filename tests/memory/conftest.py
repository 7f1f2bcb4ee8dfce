import pytest

try:
    from hf_retrieval_assist.extensions.redis import stream
except ModuleNotFoundError:  # a tree without it
    stream = None


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    if stream is not None:
        monkeypatch.setattr(stream, "_PERIOD", 0.01)
        monkeypatch.setattr(stream, "_AWAY", 0.05)
