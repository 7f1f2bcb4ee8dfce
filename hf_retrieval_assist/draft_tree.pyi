import numpy as np
from numpy.typing import NDArray

def depths(parents: NDArray[np.int32]) -> NDArray[np.int32]: ...
def ancestor_mask(parents: NDArray[np.int32]) -> NDArray[np.bool_]: ...
def path_products(
    parents: NDArray[np.int32], rates: NDArray[np.float32]
) -> NDArray[np.float32]: ...
def follow(
    token_ids: NDArray[np.int32], parents: NDArray[np.int32], tokens: NDArray[np.int32]
) -> NDArray[np.int32]: ...
def child_with(
    token_ids: NDArray[np.int32], parents: NDArray[np.int32], parent: int, token: int
) -> int: ...
def graft(
    base_tokens: NDArray[np.int32],
    base_parents: NDArray[np.int32],
    added_tokens: NDArray[np.int32],
    added_parents: NDArray[np.int32],
) -> NDArray[np.int32]: ...
