# What may stand in a place: all lengths of context together, and how likely each token is to be chosen.

# A context's share of what longer ones leave, and that of what was likely in the last token's place.
cdef float OWN = 0.45
cdef float NEARLY = 0.05
cdef float LEAST_SHARE = 0.001  # tokens that have less are not looked at

# Scores, of which a softmax makes rates: of the logarithm of a share; of a known number, and of all other tokens
# together, at temperature 0, and for the square of the temperature. By tokens of the longest context. Fitted to
# what Gemma-3-270M and SmolLM2-135M chose at temperatures 0, 0.7 and 1.
cdef float[ORDERS + 1] SLOPES = [0.35, 0.75, 1.0, 1.1, 1.2]
cdef float GAIN = 0.57
cdef float[ORDERS + 1] OTHERS = [2.7, -0.2, -1.7, -3.2, -4.4]
cdef float[ORDERS + 1] OTHERS_HOT = [1.0, 1.5, 1.6, 2.1, 2.8]
cdef float MOST_HEAT = 2  # temperatures above are taken for this one


cdef struct Law:  # how a token is chosen
    int32_t mode
    float temperature
    int32_t top_k
    float top_p, min_p


cdef struct Mix:  # the tokens that may stand in a place
    token_t ids[CANDIDATES]
    float shares[CANDIDATES]
    float rates[CANDIDATES]
    int32_t size
    int32_t order  # tokens of the longest context that is known


cdef inline void add(Mix* m, token_t token, float share) noexcept nogil:
    cdef int32_t i
    for i in range(m.size):
        if m.ids[i] == token:
            m.shares[i] += share
            return
    m.ids[m.size], m.shares[m.size] = token, share
    m.size += 1


cdef inline void add_row(Mix* m, const Row* row, float weight, token_t without) noexcept nogil:
    """Add a row's tokens but one."""
    cdef int32_t i
    for i in range(TOP):
        if row.ids[i] < 0:
            break
        if row.ids[i] != without:
            add(m, row.ids[i], weight * row.shares[i])


cdef inline float total_of(const Mix* m) noexcept nogil:
    cdef float total = 0
    cdef int32_t i
    for i in range(m.size):
        total += m.shares[i]
    return total


cdef void add_nearly(Mix* m, const Row* nearly, token_t chosen) noexcept nogil:
    """Add what was likely where `chosen` stands: it often comes next (LogitSpec, Liu et al. 2025,
    https://arxiv.org/abs/2507.01449)."""
    cdef float total = 0, share = 1
    cdef int32_t i
    for i in range(TOP):
        if nearly.ids[i] < 0:
            break
        total += nearly.shares[i] * (nearly.ids[i] != chosen)
    if m.order:
        share = NEARLY / (1 - NEARLY) * total_of(m)
    if total > 0:
        add_row(m, nearly, share / total, chosen)


cdef void remove_rare(Mix* m, token_t vocab_size) noexcept nogil:
    """Leave tokens of the vocabulary that have some share."""
    cdef int32_t i, size = m.size
    cdef float least = LEAST_SHARE * total_of(m)
    m.size = 0
    for i in range(size):
        if m.shares[i] > least and m.ids[i] < vocab_size:
            m.ids[m.size], m.shares[m.size] = m.ids[i], m.shares[i]
            m.size += 1


cdef void sort_shares(Mix* m) noexcept nogil:
    """Put the likeliest tokens first."""
    cdef int32_t i, j
    cdef token_t token
    cdef float share
    for i in range(1, m.size):
        token, share, j = m.ids[i], m.shares[i], i
        while j > 0 and m.shares[j - 1] < share:
            m.ids[j], m.shares[j] = m.ids[j - 1], m.shares[j - 1]
            j -= 1
        m.ids[j], m.shares[j] = token, share


cdef void take_likeliest(const Mix* m, Row* out) noexcept nogil:
    """The likeliest tokens of sorted ones, and their shares."""
    cdef int32_t i
    for i in range(TOP):
        out.ids[i] = m.ids[i] if i < m.size else -1
        out.shares[i] = m.shares[i] if i < m.size else 0


cdef void remove_warped(Mix* m, const Law* law) noexcept nogil:
    """Leave of sorted tokens those that the law's warpers leave."""
    cdef int32_t i
    cdef float total = 0, above = 0
    for i in range(m.size):
        m.rates[i] = powf(m.shares[i] / m.shares[0], 1 / law.temperature)
        total += m.rates[i]
    for i in range(m.size):
        if i and (i >= law.top_k or above >= law.top_p * total or m.rates[i] < law.min_p):
            m.size = i
            break
        above += m.rates[i]


cdef void rate(Mix* m, const Law* law, const uint32_t* words) noexcept nogil:
    """How likely each token is to be chosen, by chance or with the numbers of these words."""
    cdef int32_t i, o = m.order
    cdef float scale = total_of(m), highest, total, heat = 0
    cdef const uint32_t* pair
    if law.mode != LIKELIEST_ONE:
        heat = min(law.temperature, MOST_HEAT)
    total = highest = OTHERS[o] + heat * heat * OTHERS_HOT[o]
    for i in range(m.size):
        m.rates[i] = SLOPES[o] * logf(m.shares[i] / scale)
        if law.mode == BY_NUMBERS:
            pair = words + 2 * m.ids[i]
            m.rates[i] += heat * GAIN * gain_of(tempered(pair[0]), tempered(pair[1]))
        highest = max(highest, m.rates[i])
    total = expf(total - highest)
    for i in range(m.size):
        m.rates[i] = expf(m.rates[i] - highest)
        total += m.rates[i]
    for i in range(m.size):
        m.rates[i] /= total
