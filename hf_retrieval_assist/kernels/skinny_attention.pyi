from torch import Tensor

MAX_QUERIES: int
PATHS: tuple[str, ...]
OPENMP: str | None

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
