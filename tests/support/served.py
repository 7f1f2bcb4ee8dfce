"""A server of a tiny model that has learnt some answers by heart, and a client."""

import contextlib
import json
import shutil
import socket
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import openai
import torch
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from transformers import ContinuousBatchingConfig, Qwen2Config, Qwen2ForCausalLM, set_seed

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.extensions.serving.app import build_app
from hf_retrieval_assist.extensions.serving.tenants import Tenants

from .byte_model import byte_tokenizer
from .memories import wait_until

TEMPLATE = (
    "{% if tools %}<|im_start|>tools{% for t in tools %} {{ t.function.name }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('a role that nobody has') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIST = "".join(f"{i}. item {i % 3} of the list\n" for i in range(6))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ghent"}}\n</tool_call>'
ANSWERS = {"list": LIST, "rain?": CALL, "hello": "hello, and hello again"}
ASKED = [{"role": "user", "content": "hello"}]
# The least that each route's requests hold.
BODIES = {
    "chat/completions": {"messages": ASKED},
    "completions": {"prompt": "<|im_start|>user\n"},
    "responses": {"input": "hello"},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of today",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def tokenizer_of_bytes():
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = byte_tokenizer(special=["<|im_start|>", "<|im_end|>"], **ends)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def learned(path):
    """The folder of a model that has learnt the answers, and its tokenizer."""
    tokenizer = tokenizer_of_bytes()
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **ids))
    texts = []
    for asked, answer in ANSWERS.items():
        messages = [{"role": "user", "content": asked}]
        tools = [TOOL] if answer is CALL else None
        prompt = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        texts.append(tokenizer(f"{prompt}{answer}<|im_end|>").input_ids)
    width = max(map(len, texts))
    ids = torch.tensor([text + [tokenizer.eos_token_id] * (width - len(text)) for text in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def get(url, body=None, method=None, **headers):
    """The status and the text of an answer; `body`: what is posted."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def posted(served, route="chat/completions", *, headers=None, **body):
    """The status and the answer to a request that is well otherwise."""
    status, text = get(f"{served.url}/v1/{route}", BODIES[route] | body, **(headers or {}))
    return status, json.loads(text)


def text_of(answer):
    """What an answer of any route says first."""
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def health(served):
    status, text = get(f"{served.url}/health")
    return status, json.loads(text)


def changed_model(folder, to, template=None, **settings):
    """A copy of a model with another chat template, and more in its generation configuration."""
    shutil.copytree(folder, to)
    if template is not None:
        tokenizer = tokenizer_of_bytes()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(to)
    path = to / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return str(to)


def connected(url, route, body):
    """A connection whose client has sent a request, and reads no answer."""
    where = urlsplit(url)
    data = json.dumps(body).encode()
    connection = socket.create_connection((where.hostname, where.port))
    head = f"POST /v1/{route} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + data)
    return connection


@contextlib.contextmanager
def listening(app):
    """The base URL of an application that is served on the loopback address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


class Served:
    def __init__(self, url, assistant, model):
        self.url, self.assistant, self.model = url, assistant, model
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, asked, **options):
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        options = {"temperature": 0, "max_tokens": 200} | options
        return self.client.chat.completions.create(model=self.model, messages=messages, **options)

    def stream(self, asked, **options):
        """The text, and the last chunk."""
        chunks = list(self.ask(asked, stream=True, **options))
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks

    def metrics(self):
        families = text_string_to_metric_families(get(f"{self.url}/metrics")[1])
        samples = [sample for family in families for sample in family.samples]
        own = len("hf_retrieval_assist_")
        return {(one.name[own:], *one.labels.values()): one.value for one in samples}


@contextlib.contextmanager
def serving(folder, assistant=None, *, batching=False, limits=None, tenants=None, **blocks):
    """What serves the model of a folder, one request after another or side by side."""
    assistant = assistant or SamAssistant(memory=OutputMemory(), budget=8)
    blocks = {"page_size": 16, "num_blocks": 256, "max_batch_tokens": 256} | blocks
    config = {"continuous_batching": batching, "cb_config": ContinuousBatchingConfig(**blocks)}
    config |= {"limits": limits, "tenants": tenants, "device": "cpu", "dtype": "float32"}
    app = build_app(folder, assistant, **config)
    with listening(app) as url:
        wait_until(lambda: get(f"{url}/ready")[0] == 200)
        served = Served(url, assistant, folder)
        served.service = app.state.service
        yield served


def tenancy(header="x-tenant", **options):
    """A memory, the assistants that are made over it, and the tenants that they are made for."""
    memory, made = OutputMemory(), []

    def make(name):
        made.append(SamAssistant(memory=memory.namespace(name), budget=8))
        return made[-1]

    def forget(name):
        return memory.namespace(name).forget()

    return memory, made, Tenants(make, forget, header, admin_key="all", **options)
