"""transformers' continuous batching, and a server, with an assistant.

`methods` gives managers of continuous batching theirs. `app` is what `hf-retrieval-assist serve`
runs, a server of OpenAI's API for one model:

* `fields`: what requests may hold; `prompts`: what they ask the model; `held`: schemas, calls and
  penalties; `refusals`: what is told of those that are not served
* `workers`: what generates, one answer after another or side by side
* `written`: tokens become pieces of an answer; `answers`: pieces become what a route sends
* `service`: a request's way through all of these; `tenants`: whose it is

The server needs the `serve` extra and transformers 5.20 or later.
"""
