"""What several modules use."""

import pytest

from tests.corpus.documents import build, make_documents


@pytest.fixture
def store(tmp_path):
    return build(make_documents(), tmp_path / "store")
