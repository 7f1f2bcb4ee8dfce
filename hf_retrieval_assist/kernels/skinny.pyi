from collections.abc import Callable

from torch import Tensor, dtype

LinearMethod = Callable[[Tensor, Tensor, Tensor | None], Tensor]

MAX_ROWS: int
MAX_QUERIES: int
PATHS: tuple[str, ...]
OPENMP: str | None
INT8_GROUP: int
NORM_LANES: tuple[int, ...]

def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    path: str | None = None,
    threads: int | None = None,
) -> Tensor: ...
def pack_int8(
    weight: Tensor, *, path: str | None = None, threads: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def int8_linear(
    x: Tensor,
    values: Tensor,
    factors: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    path: str | None = None,
    threads: int | None = None,
) -> Tensor: ...
def scaled_linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    path: str | None = None,
    threads: int | None = None,
) -> Tensor: ...
def routed_scaled(
    x: Tensor, values: Tensor, scales: Tensor, dtype: dtype, bias: Tensor | None = None
) -> Tensor | None: ...
def compact_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    path: str | None = None,
    threads: int | None = None,
) -> Tensor: ...
def kernel_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
def routed_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...
def set_chooser(choose: Callable[[Tensor], LinearMethod], least_elements: int = 0) -> None: ...
def route_depth() -> int: ...
def set_route_depth(depth: int) -> None: ...
def in_route() -> bool: ...
def skinny_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    path: str | None = None,
    threads: int | None = None,
) -> Tensor: ...
def kernel_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor: ...
def can_attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool: ...
def fused_norm(
    x: Tensor, weight: Tensor, epsilon: float, shifted: bool, rounded: bool, lanes: int
) -> Tensor | None: ...
