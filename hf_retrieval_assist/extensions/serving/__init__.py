"""transformers' server with an assistant; what `hf-retrieval-assist serve` runs.

Loading, routes, streaming, tools and batching are those of `transformers serve`. Beside them a
model that is loaded gets the assistant attached; a chat's `prediction` is what the assistant
expects, and the answer's usage tells how much of it came; a request that cannot be served is told
which of its fields is at fault; and `/metrics` tells what the assistant did.

Needs the `serve` extra and transformers 5.17 or later.
"""

from .app import build_app

__all__ = ["build_app"]
