"""transformers' continuous batching and its server, with an assistant.

`methods` gives managers of continuous batching theirs. `app` is what `hf-retrieval-assist serve`
runs: loading, routes, streaming, tools and batching are those of `transformers serve`. Beside them
a model that is loaded gets the assistant attached; a chat's `prediction` is what the assistant
expects, and the answer's usage tells how much of it came; a request that cannot be served is told
which of its fields is at fault; and `/metrics` tells what the assistant did.

The server needs the `serve` extra and transformers 5.20 or later.
"""
