"""The command `hf-retrieval-assist serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import typer
from typer import Argument, Option

from ...system.arguments import byte_count
from .models import DTYPE, loaded
from .signals import ending_on_sigterm

_PROBES = ("/health", "/ready", "/metrics")  # which would fill the log
_FINISHING = 7.0  # seconds in which answers may be finished after SIGTERM


# The first process of a container ignores the signal until somebody handles it.
@ending_on_sigterm(0)
def serve(
    model: str = Argument(..., help="path or hub id of the model, the only one that is served"),
    memory: str | None = Option(
        None,
        metavar="PATH",
        help="file, or redis:// URL, of the outputs that later ones are drafted from; default: "
        "those since the server began",
    ),
    max_bytes: int = Option("256M", parser=byte_count, metavar="BYTES", help="memory for outputs"),
    private: bool = Option(False, "--private", help="draft from no other request's output"),
    tenants: str | None = Option(
        None,
        metavar="FILE|header:NAME",
        help="draft for each tenant from its own outputs alone: those of a file with a name and an "
        "API key in each line, or those that a header names in UTF-8, percent-encoded or not",
    ),
    admin_key: Path | None = Option(
        None, metavar="FILE", help="holds the key with which tenants are erased"
    ),
    corpus: str | None = Option(None, help="texts, or a datastore, to draft from"),
    extra_memory: int | None = Option(
        None, parser=byte_count, metavar="BYTES", help="memory for smaller copies of weights"
    ),
    prefixes: int = Option(
        "1G",
        parser=byte_count,
        metavar="BYTES",
        help="memory for keys and values of texts with which later prompts may begin, as a chat's "
        "next turn does; 0: none are kept; continuous batching shares its own",
    ),
    device: str = Option("auto", help="auto, cpu, cuda:0, ..."),
    dtype: str = DTYPE,
    trust_remote_code: bool = Option(False, "--trust-remote-code", help="run the model's own code"),
    continuous_batching: bool = Option(
        False, "--continuous-batching", help="decode requests side by side"
    ),
    cb_page_size: int | None = Option(None, min=1, help="tokens of a page of the cache"),
    cb_num_blocks: int | None = Option(None, min=1, help="blocks of the cache"),
    cb_max_batch_tokens: int | None = Option(None, min=1, help="tokens that a step may feed"),
    max_prompt_tokens: int | None = Option(
        None, min=1, metavar="N", help="tokens of a prompt; default: the model's positions"
    ),
    max_answer_tokens: int | None = Option(
        None, min=1, metavar="N", help="tokens of an answer; default: the same"
    ),
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
    from transformers import AutoTokenizer, ContinuousBatchingConfig

    try:
        import uvicorn

        from ...extensions.serving.app import build_app
    except ModuleNotFoundError as error:
        needed = "fastapi openai prometheus-client uvicorn"
        raise ImportError(f"serve needs: pip install {needed} ({error})") from error
    from ...cache.prefixes import Prefixes
    from ...extensions.serving.service import Limits
    from ...memory.output_memory import OutputMemory
    from ...presets import SamAssistant, tokenised

    for option, given in {"--memory": memory, "--tenants": tenants}.items():
        if private and given:
            raise ValueError(f"--private: expected no {option} beside it, got one")
    if admin_key is not None and tenants is None:
        raise ValueError("--admin-key: expected --tenants beside it, got none")
    place: dict[str, Any] = {} if memory is None else {"url" if "://" in memory else "path": memory}
    outputs = OutputMemory(max_bytes, **place)
    texts = None if corpus is None else tokenised(corpus, loaded(AutoTokenizer, model))
    kept = Prefixes(prefixes) if prefixes else None
    make = partial(SamAssistant, texts, extra_memory=extra_memory)
    assistant: Any = make(memory=outputs, prefixes=kept)
    owners = None
    if tenants is not None:
        owners = _tenants(tenants, admin_key, make, outputs, kept, assistant.stats)
    if private:
        assistant = assistant.private()
    bounds = {"num_blocks": cb_num_blocks, "max_batch_tokens": cb_max_batch_tokens}
    if cb_page_size is not None:
        bounds["page_size"] = cb_page_size
    app = build_app(
        model,
        assistant,
        limits=Limits(max_prompt_tokens, max_answer_tokens, max_waiting, max_seconds),
        tenants=owners,
        continuous_batching=continuous_batching,
        cb_config=ContinuousBatchingConfig(**bounds),
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
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


def _tenants(
    named: str, admin_key: Path | None, make: Any, outputs: Any, prefixes: Any, stats: Any
) -> Any:
    """Whose requests are answered, by assistants whose figures count among those of all."""
    from ...extensions.serving.tenants import Tenants, read_keys

    key = None if admin_key is None else admin_key.read_text(encoding="utf-8").strip()
    if key == "":
        raise ValueError(f"{admin_key}: expected a key, got an empty file")
    kind, _, header = named.partition(":")
    if kind == "header" and not header:
        raise ValueError("--tenants: expected header:NAME, got no name")
    whose: dict[str, Any] = {"header": header} if kind == "header" else {}
    whose = whose or {"keys": read_keys(Path(named))}

    def of_tenant(name: str) -> Any:
        own = None if prefixes is None else prefixes.namespace(name)
        made = make(memory=outputs.namespace(name), prefixes=own)
        made.stats = made.policy.stats = stats
        return made

    def forget(name: str) -> int:
        """Erase a tenant's outputs, and what was learnt and kept of its texts."""
        if prefixes is not None:
            prefixes.namespace(name).forget()
        return int(outputs.namespace(name).forget())

    return Tenants(of_tenant, forget, admin_key=key, **whose)


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
