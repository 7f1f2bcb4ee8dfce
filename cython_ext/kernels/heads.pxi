# Heads of attention: norms of queries and keys, and their rotation, in one operation.

cdef bint _is_table(object table, object x, int64_t depth):
    """Whether cosines or sines fit the rows of x, [batch, rows, ...]."""
    return (
        _is_plain(table, x.dtype)
        and table.dim() == 3
        and table.size(0) in (1, x.size(0))
        and table.size(1) == x.size(1)
        and table.size(2) == depth
    )


def can_turn(x, cosines, sines, int64_t depth, norms):
    """Whether `turn_heads` takes projections of x, a few plain rows that nobody records or transforms.

    Args:
        x: [batch, rows, ...].
        cosines, sines: [1 or batch, rows, depth].
        depth: of a head, even.
        norms: of queries' and keys' heads; `fused_norm`'s arguments behind the first; () for none.
    """
    if _is_grad_enabled() or depth < 2 or depth % 2 or not _can_multiply(x) or x.dim() != 3:
        return False
    if not (_is_table(cosines, x, depth) and _is_table(sines, x, depth)):
        return False
    for norm in norms:
        if not norm:
            continue
        weight = norm[0]
        if not _is_plain(weight, x.dtype) or weight.shape != (depth,) or not weight.is_contiguous():
            return False
    return True


def turn_heads(heads, cosines, sines, int64_t depth, norms):
    """Norm and turn queries and keys in place, in the roundings of PyTorch's operators one after another:
    `head * cosines` plus `(-upper half, lower half) * sines`.

    Args:
        heads: queries, keys and values, [batch, rows, heads * depth] each, written to.
        cosines, sines, depth, norms: what `can_turn` accepts.

    Returns:
        Views of the three, [batch, heads, rows, depth]; None where they are not of this kind.
    """
    for part in heads:
        if not _is_plain(part, cosines.dtype) or not part.is_contiguous() or part.size(-1) % depth:
            return None
    batch, rows = heads[0].shape[:2]
    cosines, sines = _adjacent_table(cosines, batch), _adjacent_table(sines, batch)
    for part, norm in zip(heads, norms):
        _turn(part, cosines, sines, depth, norm)
    return [part.view(batch, rows, -1, depth).transpose(1, 2) for part in heads]


cdef object _adjacent_table(object table, object batch):
    if table.size(0) != batch:
        table = table.expand(batch, -1, -1)
    return table.contiguous()


cdef int _turn(object heads, object cosines, object sines, int64_t depth, object norm) except -1:
    cdef norm_problem problem
    _place_rows(&problem, heads, heads, depth)
    problem.heads = <int64_t>heads.size(-1) // depth
    problem.cosines = <char *><uintptr_t>cosines.data_ptr()
    problem.sines = <char *><uintptr_t>sines.data_ptr()
    problem.weight = NULL
    if norm:
        weight, epsilon, shifted, rounded, lanes = norm
        _weigh(&problem, weight, epsilon, shifted, rounded, lanes)
    return _norm_rows(&problem)
