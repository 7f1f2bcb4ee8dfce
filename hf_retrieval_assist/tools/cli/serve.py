"""The command `hf-retrieval-assist serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer import Argument, Option

from ...system.arguments import byte_count
from .models import DTYPE, loaded
from .signals import on_sigterm

_PROBES = ("/health", "/ready", "/metrics")  # which would fill the log
_FINISHING = 7.0  # seconds in which answers may be finished after SIGTERM

_MEMORY = Option(
    None,
    metavar="PATH",
    help="file, or redis:// URL, of the outputs that later ones are drafted from; default: those "
    "since the server began",
)
_MAX_BYTES = Option("256M", parser=byte_count, metavar="BYTES", help="memory for outputs")
_EXTRA = Option(
    None, parser=byte_count, metavar="BYTES", help="memory for smaller copies of weights"
)
_PREFIXES = Option(
    "1G",
    parser=byte_count,
    metavar="BYTES",
    help="memory for keys and values of texts with which later prompts may begin, as a chat's next "
    "turn does; 0: none are kept; continuous batching shares its own",
)
_TENANTS = Option(
    None,
    metavar="FILE|header:NAME",
    help="draft for each tenant from its own outputs alone: those of a file with a name and an API "
    "key in each line, or those that a header names in UTF-8, percent-encoded or not",
)
_ADMIN = Option(None, metavar="FILE", help="holds the key with which tenants are erased")
_BATCHING = Option(False, "--continuous-batching", help="decode requests side by side")
_PROMPT = Option(
    None, min=1, metavar="N", help="tokens of a prompt; default: the model's positions"
)
_ANSWER = Option(None, min=1, metavar="N", help="tokens of an answer; default: the same")


def _ended(*_: Any) -> NoReturn:
    raise SystemExit(0)


# The first process of a container ignores the signal until somebody handles it.
@on_sigterm(_ended)
def serve(
    model: str = Argument(..., help="path or hub id of the model, the only one that is served"),
    memory: str | None = _MEMORY,
    max_bytes: int = _MAX_BYTES,
    private: bool = Option(False, "--private", help="draft from no other request's output"),
    tenants: str | None = _TENANTS,
    admin_key: Path | None = _ADMIN,
    corpus: str | None = Option(None, help="texts, or a datastore, to draft from"),
    extra_memory: int | None = _EXTRA,
    prefixes: int = _PREFIXES,
    device: str = Option("auto", help="auto, cpu, cuda:0, ..."),
    dtype: str = DTYPE,
    attn_implementation: str | None = Option(None, help="such as sdpa or eager"),
    trust_remote_code: bool = Option(False, "--trust-remote-code", help="run the model's own code"),
    continuous_batching: bool = _BATCHING,
    cb_page_size: int | None = Option(None, min=1, help="tokens of a page of the cache"),
    cb_num_blocks: int | None = Option(None, min=1, help="blocks of the cache"),
    cb_max_batch_tokens: int | None = Option(None, min=1, help="tokens that a step may feed"),
    max_prompt_tokens: int | None = _PROMPT,
    max_answer_tokens: int | None = _ANSWER,
    max_waiting: int = Option(
        128, min=1, metavar="N", help="answers that may wait, of each tenant"
    ),
    max_seconds: float = Option(600, min=1, metavar="S", help="of a request, waiting included"),
    host: str = Option("localhost", help="address that is listened at"),
    port: int = Option(8000, min=0, help="0: any that is free"),
    enable_cors: bool = Option(False, "--enable-cors", help="let pages of any origin ask"),
    log_level: str = Option("info", help="debug, info, warning, error"),
) -> None:
    """Serve a model by an OpenAI-compatible API, with drafts, until interrupted."""
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        raise FileNotFoundError(f"MODEL: expected a folder or hub id, got {model}, which is none")
    from transformers import ContinuousBatchingConfig

    uvicorn, build_app = _server()
    from ...extensions.serving.service import Limits

    make = _Assistants(model, memory, max_bytes, private, corpus, extra_memory, prefixes)
    owners = _tenants(tenants, admin_key, private, make)
    bounds = {"num_blocks": cb_num_blocks, "max_batch_tokens": cb_max_batch_tokens}
    if cb_page_size is not None:
        bounds["page_size"] = cb_page_size
    loading = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    loading |= {"device": device, "dtype": dtype}
    app = build_app(
        model,
        make.assistant,
        limits=Limits(max_prompt_tokens, max_answer_tokens, max_waiting, max_seconds),
        tenants=owners,
        continuous_batching=continuous_batching,
        cb_config=ContinuousBatchingConfig(**bounds),
        enable_cors=enable_cors,
        **loading,
    )
    service = app.state.service
    told = service.told | {
        "assistant": make.assistant,
        "outputs": make.about if owners is None else f"{make.about}, of each tenant alone",
        "tenants": "none: all requests share outputs" if owners is None else owners,
        "corpus": corpus or "none",
    }
    if private:
        told |= {"outputs": "kept for nobody", "tenants": "none"}
    for name, value in told.items():
        print(f"{name:<10} {value}", flush=True)
    service.on_ready = lambda: print("ready: the model has been tested", flush=True)
    _run(uvicorn, app, host=host, port=port, log_level=log_level)


class _Assistants:
    """Makes the assistants of a server: one for all requests, or one for each tenant.

    Attributes:
        assistant: for all requests.
    """

    def __init__(
        self,
        model: str,
        memory: str | None,
        max_bytes: int,
        private: bool,
        corpus: str | None,
        extra_memory: int | None,
        prefixes: int,
    ) -> None:
        from transformers import AutoTokenizer

        from ...cache.prefixes import Prefixes
        from ...memory.output_memory import OutputMemory
        from ...presets import tokenised

        if private and memory:
            raise ValueError("--private: expected no --memory beside it, got one")
        place: dict[str, Any] = {}
        if memory is not None:
            place = {"url" if "://" in memory else "path": memory}
        self._memory = OutputMemory(max_bytes, **place)
        self._extra_memory = extra_memory
        self._prefixes = Prefixes(prefixes) if prefixes else None
        # Tenants share what is indexed.
        tokenizer = None if corpus is None else loaded(AutoTokenizer, model)
        self._corpus = None if corpus is None else tokenised(corpus, tokenizer)
        made = self._made(self._memory, self._prefixes)
        self.assistant = made.private() if private else made

    def _made(self, memory: Any, prefixes: Any) -> Any:
        from ...presets import SamAssistant

        options = {"extra_memory": self._extra_memory, "prefixes": prefixes}
        return SamAssistant(self._corpus, memory=memory, **options)

    def of_tenant(self, name: str) -> Any:
        """A tenant's, whose figures count among those of all."""
        own = None if self._prefixes is None else self._prefixes.namespace(name)
        made = self._made(self._memory.namespace(name), own)
        made.stats = made.policy.stats = self.assistant.stats
        return made

    def forget(self, tenant: str) -> int:
        """Erase a tenant's outputs, and what was learnt and kept of its texts; how many those
        were."""
        if self._prefixes is not None:
            self._prefixes.namespace(tenant).forget()
        return self._memory.namespace(tenant).forget()

    @property
    def about(self) -> str:
        """Where outputs are kept."""
        return f"{self._memory!r}"


def _tenants(named: str | None, admin_key: Path | None, private: bool, make: _Assistants) -> Any:
    """Whose requests are answered; None: everybody's."""
    if private and named is not None:
        raise ValueError("--private: expected no --tenants beside it, got some")
    if named is None:
        if admin_key is not None:
            raise ValueError("--admin-key: expected --tenants beside it, got none")
        return None
    from ...extensions.serving.tenants import Tenants, read_keys

    key = None if admin_key is None else admin_key.read_text(encoding="utf-8").strip()
    if key == "":
        raise ValueError(f"{admin_key}: expected a key, got an empty file")
    kind, _, header = named.partition(":")
    whose: dict[str, Any] = {"header": header}
    if kind != "header":
        whose = {"keys": read_keys(Path(named))}
    elif not header:
        raise ValueError("--tenants: expected header:NAME, got no name")
    return Tenants(make.of_tenant, make.forget, admin_key=key, **whose)


def _server() -> tuple[Any, Any]:
    """The module that listens, and what makes the application."""
    try:
        import uvicorn

        from ...extensions.serving.app import build_app
    except ModuleNotFoundError as error:
        needed = "fastapi openai prometheus-client uvicorn"
        raise ImportError(f"serve needs: pip install {needed} ({error})") from error
    return uvicorn, build_app


def _run(uvicorn: Any, app: Any, **options: Any) -> None:
    """Answer until a signal, then finish what is being written, for some seconds."""
    service = app.state.service

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            loop = asyncio.get_running_loop()
            loop.call_later(_FINISHING, loop.run_in_executor, None, service.close)
            await super().shutdown(sockets)

    access = logging.getLogger("uvicorn.access")
    access.addFilter(lambda line: not any(f"GET {one} " in line.getMessage() for one in _PROBES))
    code: Any = 0
    try:
        Server(uvicorn.Config(app, timeout_graceful_shutdown=_FINISHING + 1, **options)).run()
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code
    if not service.close():
        # A forward goes on, which nothing can interrupt; what was written is on disk.
        sys.stdout.flush()
        os._exit(int(code or 0))
    raise typer.Exit(code)
