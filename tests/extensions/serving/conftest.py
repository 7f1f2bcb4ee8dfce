import transformers
from packaging.version import Version

# Earlier releases have another continuous batching, and what the server extends is not there.
OLD = Version(transformers.__version__) < Version("5.20")
collect_ignore_glob = ["test_*.py"] if OLD else []
