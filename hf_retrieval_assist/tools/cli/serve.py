"""The command `hf-retrieval-assist serve`."""

from __future__ import annotations

from typing import Any

from typer import Argument, Option

from .models import DTYPE, loaded

_MEMORY = Option(
    None,
    metavar="PATH",
    help="file, or redis:// URL, of the outputs that later ones are drafted from; default: those "
    "since the server began",
)
_BATCHING = Option(False, "--continuous-batching", help="decode requests side by side")


def serve(
    model: str = Argument(..., help="path or hub id of the model, the only one that is served"),
    memory: str | None = _MEMORY,
    private: bool = Option(False, "--private", help="draft from no other request's output"),
    corpus: str | None = Option(None, help="texts, or a datastore, to draft from"),
    device: str = Option("auto", help="auto, cpu, cuda:0, ..."),
    dtype: str = DTYPE,
    attn_implementation: str | None = Option(None, help="such as sdpa or eager"),
    trust_remote_code: bool = Option(False, "--trust-remote-code", help="run the model's own code"),
    continuous_batching: bool = _BATCHING,
    cb_page_size: int | None = Option(None, min=1, help="tokens of a page of the cache"),
    cb_num_blocks: int | None = Option(None, min=1, help="blocks of the cache"),
    cb_max_batch_tokens: int | None = Option(None, min=1, help="tokens that a step may feed"),
    host: str = Option("localhost", help="address that is listened at"),
    port: int = Option(8000, min=0, help="0: any that is free"),
    enable_cors: bool = Option(False, "--enable-cors", help="let pages of any origin ask"),
    log_level: str = Option("info", help="debug, info, warning, error"),
) -> None:
    """Serve a model by an OpenAI-compatible API, with drafts, until interrupted."""
    from transformers import ContinuousBatchingConfig

    uvicorn, build_app = _server()
    assistant = _assistant(model, memory, private, corpus)
    limits = {"num_blocks": cb_num_blocks, "max_batch_tokens": cb_max_batch_tokens}
    if cb_page_size is not None:
        limits["page_size"] = cb_page_size
    loading = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    loading |= {"device": device, "dtype": dtype}
    served: dict[str, Any] = {"continuous_batching": continuous_batching}
    served |= {"cb_config": ContinuousBatchingConfig(**limits), "enable_cors": enable_cors}
    app = build_app(model, assistant, **served, **loading)
    uvicorn.run(app, host=host, port=port, log_level=log_level)


def _server() -> tuple[Any, Any]:
    """The module that listens, and what makes the application."""
    try:
        import uvicorn

        from ...extensions.serving.app import build_app
    except ModuleNotFoundError as error:
        needed = "fastapi openai prometheus-client uvicorn"
        raise ImportError(f"serve needs: pip install {needed} ({error})") from error
    return uvicorn, build_app


def _assistant(model: str, memory: str | None, private: bool, corpus: str | None) -> Any:
    from transformers import AutoTokenizer

    from ...memory.output_memory import OutputMemory
    from ...presets import SamAssistant

    if private and memory:
        raise ValueError("--private: expected no --memory beside it, got one")
    place = "url" if memory is not None and "://" in memory else "path"
    outputs = OutputMemory(**{place: memory})  # type: ignore[arg-type]
    tokenizer = None if corpus is None else loaded(AutoTokenizer, model)
    assistant = SamAssistant(corpus, memory=outputs, tokenizer=tokenizer)
    return assistant.private() if private else assistant
