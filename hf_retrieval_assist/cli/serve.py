"""The command `hf-retrieval-assist serve`."""

from __future__ import annotations

import argparse

from .command import Command
from .values import at_least, dtype, loaded


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="path or hub id of the model, the only one that is served")
    parser.add_argument(
        "--memory",
        metavar="PATH",
        help="file, or redis:// URL, of the outputs that later ones are drafted from; default: "
        "those since the server began",
    )
    parser.add_argument(
        "--private", action="store_true", help="draft from no other request's output"
    )
    parser.add_argument("--corpus", metavar="PATH", help="texts, or a datastore, to draft from")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:0, ...")
    parser.add_argument("--dtype", type=dtype, default="auto", help="auto, float32, bfloat16, ...")
    parser.add_argument("--attn-implementation", help="such as sdpa or eager")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")
    parser.add_argument(
        "--continuous-batching", action="store_true", help="decode requests side by side"
    )
    parser.add_argument(
        "--cb-page-size", type=at_least(1), metavar="N", help="tokens of a page of the cache"
    )
    parser.add_argument(
        "--cb-num-blocks", type=at_least(1), metavar="N", help="blocks of the cache"
    )
    parser.add_argument(
        "--cb-max-batch-tokens", type=at_least(1), metavar="N", help="tokens that a step may feed"
    )
    parser.add_argument("--host", default="localhost", help="address that is listened at")
    parser.add_argument("--port", type=at_least(0), default=8000, help="0: any that is free")
    parser.add_argument("--enable-cors", action="store_true", help="let pages of any origin ask")
    parser.add_argument("--log-level", default="info", help="debug, info, warning, error")


def _run(args: argparse.Namespace) -> None:
    """Load the model and serve it until interrupted."""
    try:
        import uvicorn

        from ..serving import build_app
    except ImportError as error:
        raise ImportError(
            f"serve needs: pip install 'hf-retrieval-assist[serve]' ({error})"
        ) from error

    from transformers import AutoTokenizer, ContinuousBatchingConfig

    from ..memory.output_memory import OutputMemory
    from ..presets import SamAssistant

    if args.private and args.memory:
        raise ValueError("--private: expected no --memory beside it, got one")
    is_url = args.memory is not None and "://" in args.memory
    memory = OutputMemory(
        **{} if args.memory is None else {"url" if is_url else "path": args.memory}
    )
    tokenizer = None if args.corpus is None else loaded(AutoTokenizer, args.model)
    assistant = SamAssistant(args.corpus, memory=memory, tokenizer=tokenizer)
    limits = {
        name: value
        for name in ("page_size", "num_blocks", "max_batch_tokens")
        if (value := getattr(args, f"cb_{name}")) is not None
    }
    app = build_app(
        args.model,
        assistant.private() if args.private else assistant,
        continuous_batching=args.continuous_batching,
        cb_config=ContinuousBatchingConfig(**limits) if limits else None,
        enable_cors=args.enable_cors,
        device=args.device,
        dtype=args.dtype,
        attn_implementation=args.attn_implementation,
        trust_remote_code=args.trust_remote_code,
    )
    uvicorn.run(app, host=args.host, port=args.port, log_level=args.log_level)


COMMAND = Command("serve a model by an OpenAI-compatible API, with drafts", _add_arguments, _run)
