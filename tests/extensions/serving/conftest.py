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
