"""The command `hf-retrieval-assist serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from functools import partial
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
    log_level: str = Option("info", help="debug, info, warning, error"),
) -> None:
    """Serve a model by an OpenAI-compatible API, with drafts, until interrupted."""
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        raise FileNotFoundError(f"MODEL: expected a folder or hub id, got {model}, which is none")
    from transformers import ContinuousBatchingConfig

    uvicorn, build_app = _server()
    from ...extensions.serving.service import Limits

    for option, given in {"--memory": memory, "--tenants": tenants}.items():
        if private and given:
            raise ValueError(f"--private: expected no {option} beside it, got one")
    if admin_key is not None and tenants is None:
        raise ValueError("--admin-key: expected --tenants beside it, got none")
    outputs = _outputs(memory, max_bytes)
    make = _Assistants(outputs, prefixes, extra_memory, _corpus(corpus, model))
    assistant = make.assistant.private() if private else make.assistant
    owners = None if tenants is None else _tenants(tenants, admin_key, make)
    bounds = {"num_blocks": cb_num_blocks, "max_batch_tokens": cb_max_batch_tokens}
    if cb_page_size is not None:
        bounds["page_size"] = cb_page_size
    loading = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    app = build_app(
        model,
        assistant,
        limits=Limits(max_prompt_tokens, max_answer_tokens, max_waiting, max_seconds),
        tenants=owners,
        continuous_batching=continuous_batching,
        cb_config=ContinuousBatchingConfig(**bounds),
        **loading,
    )
    service = app.state.service
    told = service.told | {
        "assistant": assistant,
        "outputs": "kept for nobody" if private else outputs,
        "tenants": "none" if owners is None else owners,
        "corpus": corpus or "none",
    }
    for name, value in told.items():
        print(f"{name:<10} {value}", flush=True)
    service.on_ready = lambda: print("ready: the model has been tested", flush=True)
    _run(uvicorn, app, host=host, port=port, log_level=log_level)


def _outputs(memory: str | None, max_bytes: int) -> Any:
    """The memory of outputs, in a file, on a server or of this process."""
    from ...memory.output_memory import OutputMemory

    if memory is None:
        return OutputMemory(max_bytes)
    if "://" in memory:
        return OutputMemory(max_bytes, url=memory)
    return OutputMemory(max_bytes, path=memory)


def _corpus(corpus: str | None, model: str) -> Any:
    """What is indexed for all tenants."""
    from transformers import AutoTokenizer

    from ...presets import tokenised

    return None if corpus is None else tokenised(corpus, loaded(AutoTokenizer, model))


class _Assistants:
    """Makes the assistants of a server.

    Attributes:
        assistant: for all requests.
    """

    def __init__(self, outputs: Any, prefixes: int, extra_memory: int | None, corpus: Any) -> None:
        from ...cache.prefixes import Prefixes
        from ...presets import SamAssistant

        self._outputs, self._prefixes = outputs, Prefixes(prefixes) if prefixes else None
        self._make = partial(SamAssistant, corpus, extra_memory=extra_memory)
        self.assistant = self._make(memory=outputs, prefixes=self._prefixes)

    def of_tenant(self, name: str) -> Any:
        """A tenant's, whose figures count among those of all."""
        own = None if self._prefixes is None else self._prefixes.namespace(name)
        made = self._make(memory=self._outputs.namespace(name), prefixes=own)
        made.stats = made.policy.stats = self.assistant.stats
        return made

    def forget(self, tenant: str) -> int:
        """Erase a tenant's outputs, and what was learnt and kept of its texts; how many those
        were."""
        if self._prefixes is not None:
            self._prefixes.namespace(tenant).forget()
        return int(self._outputs.namespace(tenant).forget())


def _tenants(named: str, admin_key: Path | None, make: _Assistants) -> Any:
    """Whose requests are answered."""
    from ...extensions.serving.tenants import Tenants, read_keys

    key = None if admin_key is None else admin_key.read_text(encoding="utf-8").strip()
    if key == "":
        raise ValueError(f"{admin_key}: expected a key, got an empty file")
    kind, _, header = named.partition(":")
    if kind == "header" and not header:
        raise ValueError("--tenants: expected header:NAME, got no name")
    whose: dict[str, Any] = {"header": header} if kind == "header" else {}
    whose = whose or {"keys": read_keys(Path(named))}
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
