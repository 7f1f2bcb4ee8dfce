# The most frequent continuations of a match, found in two passes.
#
# The first finds candidates in batches, largest ranges first: it samples a range of suffixes densely
# enough that no code frequent enough for the tree can hide between two samples, and then finds the
# ends of all codes of the batch together. The second takes candidates best-first. What is taken, and
# in which order, depends on the exact counts alone, not on the batches.

cdef enum:
    ABSENT = -2       # the node of a candidate that is not in the tree
    DENSITY = 2       # samples per code that is just frequent enough
    DEPTH_BITS = 17
    BATCH = 64        # ranges that are sampled together

cdef struct Tree:             # what was taken, in the arrays that the caller gets
    int32_t size
    int32_t capacity
    int32_t* token_ids
    int32_t* parents
    int32_t* contexts
    int64_t* counts
    int64_t* parent_counts

cdef struct Candidate:        # the match with a continuation of `depth` tokens
    int64_t count
    uint32_t code             # its last token's
    int32_t parent            # candidate without the last token; the first candidate is the match
    int32_t depth
    int32_t row               # its suffixes
    int32_t child             # newest candidate that continues it, then by `sibling`; 0 for none
    int32_t sibling
    int32_t node              # the tree's: -1 for the match, or ABSENT

cdef struct Range:            # suffixes of a candidate among whose next codes some are not known
    int32_t parent
    int32_t row

cdef struct Split:            # a range in the batch
    int32_t range             # its index
    const Interval* row       # its suffixes
    int32_t offset            # place of its codes in their suffixes
    int64_t spacing           # suffixes of a shard per sample
    bint complete             # no code of use is missing from those below
    int32_t samples           # first of its samples; those of each shard follow each other
    int32_t samples_end
    int32_t first_code
    int32_t codes

cdef struct Selection:
    const Shard* shards
    int32_t shard_count
    int64_t vocab_size
    int32_t codes_left        # candidates that there is room for
    int32_t searches_left     # codes of long ranges that may be looked for
    int32_t length            # the match's
    int32_t depth             # most tokens of a continuation
    int32_t wanted            # nodes that the tree has room for
    int32_t candidate_count
    int32_t range_count
    int32_t range_limit
    int32_t row_count
    int32_t frontier_size
    int32_t best_size
    int32_t split_count
    int32_t sample_count
    int32_t code_count
    Candidate* candidates     # [codes + 1]
    Range* ranges             # [range_limit]
    Entry* frontier            # [as many], heap of ranges; in the second pass of candidates
    Interval* rows            # [3 * codes + 1, shard_count]
    Entry* best                # [nodes + 1], heap of the `wanted` best candidates, the worst on top
    Sample* samples           # [2 * (LANES + shard_count)]
    uint32_t* found           # [LANES + shard_count], the codes of one split ...
    int64_t* most             # ... and how often they may occur
    Probe[2 * LANES] probes
    uint32_t[LANES] codes     # all splits'
    Split[BATCH] splits

cdef int64_t key_of(int64_t count, int32_t depth) noexcept nogil:
    """Orders by count, then the shallower first."""
    return (count << DEPTH_BITS) - depth

cdef int64_t least_key(const Selection* work) noexcept nogil:
    """No candidate with a lower key can be taken any more."""
    return <int64_t>-work.best[0].key if work.best_size == work.wanted else 0

cdef int64_t least_count(const Selection* work) noexcept nogil:
    """No candidate that occurs less often can be taken any more."""
    return (least_key(work) + (1 << DEPTH_BITS) - 1) >> DEPTH_BITS


# ---------------------------------------------------------------------------------- the tree

cdef int32_t find_node(const Tree* tree, int32_t parent, uint32_t code) noexcept nogil:
    cdef int32_t node, token = <int32_t>(code - 1)
    if parent == ABSENT:
        return ABSENT
    for node in range(parent + 1, tree.size):
        if tree.parents[node] == parent and tree.token_ids[node] == token:
            return node
    return ABSENT

cdef void take(Selection* work, Candidate* candidate, Tree* tree) noexcept nogil:
    """Make a candidate, whose parent is in the tree, a node of its own."""
    cdef const Candidate* parent = &work.candidates[candidate.parent]
    cdef int32_t node = tree.size
    tree.token_ids[node] = <int32_t>(candidate.code - 1)
    tree.parents[node] = parent.node
    tree.contexts[node] = work.length + parent.depth
    tree.counts[node] = candidate.count
    tree.parent_counts[node] = parent.count
    tree.size = node + 1
    candidate.node = node

cdef void push_children(Selection* work, int32_t parent) noexcept nogil:
    cdef int32_t child = work.candidates[parent].child
    cdef int64_t node = work.candidates[parent].node + 1
    cdef const Candidate* candidate
    while child:
        candidate = &work.candidates[child]
        push(work.frontier, &work.frontier_size, Entry(
            key_of(candidate.count, candidate.depth), node << 32 | candidate.code, child
        ))
        child = candidate.sibling

cdef void take_best(Selection* work, Tree* tree) noexcept nogil:
    """The second pass: by count, then depth, earlier parent, lower code."""
    cdef int32_t index
    cdef Candidate* candidate
    work.frontier_size = 0
    push_children(work, 0)
    while work.frontier_size > 0 and tree.size < tree.capacity:
        index = pop(work.frontier, &work.frontier_size).index
        candidate = &work.candidates[index]
        # Taken already, with a longer match or twice in an altered file.
        candidate.node = find_node(tree, work.candidates[candidate.parent].node, candidate.code)
        if candidate.node == ABSENT:
            take(work, candidate, tree)
        push_children(work, index)


# ---------------------------------------------------------------------------------- candidates

cdef inline int64_t total(const Selection* work, int32_t row) noexcept nogil:
    return suffixes_in(work.rows + row * work.shard_count, work.shard_count)

cdef void add_range(Selection* work, int32_t parent, int32_t row) noexcept nogil:
    cdef int64_t count = total(work, row)
    cdef int64_t key = key_of(count, work.candidates[parent].depth + 1)
    cdef int32_t index = work.range_count
    if count == 0 or key < least_key(work) or index == work.range_limit:
        return
    work.ranges[index] = Range(parent, row)
    work.range_count = index + 1
    push(work.frontier, &work.frontier_size, Entry(key, index, index))

cdef void add_candidate(
    Selection* work, const Tree* tree, int32_t parent, uint32_t code, int32_t row
) noexcept nogil:
    cdef Candidate* above = &work.candidates[parent]
    cdef int32_t index = work.candidate_count
    cdef int64_t count = total(work, row)
    cdef int64_t key = key_of(count, above.depth + 1)
    cdef int32_t node = find_node(tree, above.node, code)
    if count == 0 or key < least_key(work):
        return
    work.candidates[index] = Candidate(count, code, parent, above.depth + 1, row, 0, above.child, node)
    work.candidate_count = index + 1
    above.child = index
    if node == ABSENT:
        push(work.best, &work.best_size, Entry(-key, 0, index))
        if work.best_size > work.wanted:
            pop(work.best, &work.best_size)
    if above.depth + 1 < work.depth:
        add_range(work, index, row)

cdef int32_t samples_of(Interval within, int64_t spacing) noexcept nogil:
    cdef int64_t size = within.high - within.low
    return <int32_t>min(size, size // spacing + 1)

cdef void plan_split(Selection* work, int32_t index) noexcept nogil:
    """Add a range to the batch and ask for the suffixes that it will sample."""
    cdef Split* split = &work.splits[work.split_count]
    cdef Range part = work.ranges[index]
    cdef int64_t least = least_count(work)
    cdef int64_t size
    cdef int32_t s, i, seen
    split.range = index
    split.row = work.rows + part.row * work.shard_count
    split.offset = work.length + work.candidates[part.parent].depth
    split.samples = work.sample_count
    split.spacing = (total(work, part.row) + LANES - 1) // LANES
    if split.spacing > 1:  # a short range is read as a whole, which needs no search
        split.spacing = max(split.spacing, least // (DENSITY * work.shard_count))
    # What lies between two neighbouring samples of every shard is rarer than this.
    split.complete = split.spacing == 1 or split.spacing * work.shard_count <= least
    for s in range(work.shard_count):
        size, seen = split.row[s].high - split.row[s].low, samples_of(split.row[s], split.spacing)
        for i in range(seen):  # spread evenly: all ranks if they are as many
            work.samples[work.sample_count] = Sample(
                &work.shards[s], split.row[s].low + (2 * i + 1) * size // (2 * seen), 0, split.offset, 0
            )
            ask_rank(&work.shards[s], work.samples[work.sample_count].rank)
            work.sample_count += 1
    split.samples_end = work.sample_count
    work.split_count += 1

cdef void plan_batch(Selection* work) noexcept nogil:
    """Fill the batch with the largest ranges, as long as all their codes have room."""
    cdef int32_t index
    cdef int64_t count
    work.split_count = work.sample_count = work.code_count = 0
    while work.frontier_size > 0 and work.frontier[0].key >= least_key(work) and work.split_count < BATCH:
        index = work.frontier[0].index
        count = total(work, work.ranges[index].row)
        if work.split_count and work.sample_count + min(count, <int64_t>LANES) > LANES:
            return
        pop(work.frontier, &work.frontier_size)
        if count <= LANES or work.searches_left > 0:
            plan_split(work, index)

cdef void read_samples(Selection* work) noexcept nogil:
    cdef int32_t i
    cdef Sample* sample
    for i in range(work.sample_count):
        sample = &work.samples[i]
        sample.place = ask_place(sample.shard, sample.rank, sample.offset)
    for i in range(work.sample_count):
        work.samples[i].code = code_at(&work.samples[i].shard.text, work.samples[i].place)

cdef int32_t insert(uint32_t* codes, int32_t count, uint32_t code) noexcept nogil:
    """Put a code into an ascending list unless it is there; returns how many there are."""
    cdef int32_t i = count
    while i > 0 and codes[i - 1] > code:
        i -= 1
    if i > 0 and codes[i - 1] == code:
        return count
    memmove(codes + i + 1, codes + i, (count - i) * sizeof(uint32_t))
    codes[i] = code
    return count + 1

cdef int32_t bracket(
    Interval within, const Sample* samples, int32_t count, uint32_t code, int32_t start, Probe* ends
) noexcept nogil:
    """Narrow the probes for a code's first suffix and for the one after its last, going by the
    samples from `start`, where those of the code before ended. Returns where its own end."""
    cdef int32_t stop = start
    while start < count and samples[start].code < code:
        start += 1
    stop = start
    while stop < count and samples[stop].code == code:
        stop += 1
    ends[0].low = samples[start - 1].rank + 1 if start else within.low
    ends[0].high = samples[start].rank if start < count else within.high
    ends[1].low = samples[stop - 1].rank + 1 if stop else within.low
    ends[1].high = samples[stop].rank if stop < count else within.high
    return stop

cdef void bound_codes(Selection* work, const Split* split, int32_t found) noexcept nogil:
    """How often each code of a split may occur, going by the samples."""
    cdef const Sample* samples = work.samples + split.samples
    cdef int32_t s, i, start, seen
    cdef Probe[2] ends
    for i in range(found):
        work.most[i] = 0
    for s in range(work.shard_count):
        seen = samples_of(split.row[s], split.spacing)
        start = 0
        for i in range(found):
            start = bracket(split.row[s], samples, seen, work.found[i], start, ends)
            work.most[i] += ends[1].high - ends[0].low
        samples += seen

cdef int32_t select_codes(Selection* work, int32_t found, int64_t least, int32_t room) noexcept nogil:
    """Keep the codes that may occur `least` times, of those the `room` most frequent; how many."""
    cdef int32_t i, j, ahead, kept = 0
    for i in range(found):
        ahead = 0
        if found > room:
            for j in range(found):
                ahead += work.most[j] > work.most[i] or (work.most[j] == work.most[i] and j < i)
        if work.most[i] >= least and ahead < room:
            work.found[kept] = work.found[i]
            kept += 1
    return kept

cdef int32_t sampled_codes(Selection* work, const Split* split) noexcept nogil:
    """Fill `found` with the codes of a split's samples; returns how many."""
    cdef int32_t found = 0, i
    for i in range(split.samples, split.samples_end):
        if work.samples[i].code <= work.vocab_size:  # but in an altered file
            found = insert(work.found, found, work.samples[i].code)
    return found

cdef void choose_codes(Selection* work, Split* split) noexcept nogil:
    """The codes of a split that are looked for, as many as there is room for."""
    cdef int32_t room = min(LANES - work.code_count, work.codes_left)
    cdef int32_t found = sampled_codes(work, split)
    cdef int64_t least = least_count(work) if split.complete else 0
    cdef bint searched = split.spacing > 1
    cdef int32_t i
    if searched:
        room = min(room, work.searches_left)
    split.first_code = work.code_count
    split.codes = found
    if found > room or least > 1:
        bound_codes(work, split, found)
        split.codes = select_codes(work, found, least, room)
    split.complete = found == 0 or (split.complete and (found <= room or split.codes < room))
    for i in range(split.codes):
        work.codes[work.code_count + i] = work.found[i]
    if searched:
        work.searches_left -= split.codes
    work.code_count += split.codes
    work.codes_left -= split.codes

cdef void cut_shard(Selection* work, int32_t s) noexcept nogil:
    """Find the codes of the batch in one shard and write its column of the new rows."""
    cdef int32_t shards = work.shard_count, first_row = work.row_count, e, i, seen, start, before
    cdef const Split* split
    cdef const Sample* samples
    cdef Interval* out
    cdef Probe* ends
    cdef int64_t low
    for e in range(work.split_count):
        split = &work.splits[e]
        samples = work.samples + split.samples
        for before in range(s):
            samples += samples_of(split.row[before], split.spacing)
        seen = samples_of(split.row[s], split.spacing)
        start = 0
        for i in range(split.first_code, split.first_code + split.codes):
            ends = &work.probes[2 * i]
            start = bracket(split.row[s], samples, seen, work.codes[i], start, ends)
            ends[0].code, ends[1].code = work.codes[i], work.codes[i] + 1
            ends[0].offset = ends[1].offset = split.offset
    search_together(&work.shards[s], work.probes, 2 * work.code_count)
    for e in range(work.split_count):
        split = &work.splits[e]
        if split.codes == 0:
            continue
        out = work.rows + first_row * shards + s
        low = split.row[s].low
        for i in range(2 * split.codes):
            ends = &work.probes[2 * split.first_code + i]
            out[i * shards] = Interval(low, max(low, ends.low))
            low = max(low, ends.low)
        out[2 * split.codes * shards] = Interval(low, max(low, split.row[s].high))
        first_row += 2 * split.codes + 1

cdef void collect(Selection* work, const Tree* tree) noexcept nogil:
    """Make candidates of the codes of the batch, and ranges of what may hide more."""
    cdef int32_t e, i, parent
    cdef uint32_t code
    cdef const Split* split
    for e in range(work.split_count):
        split = &work.splits[e]
        parent = work.ranges[split.range].parent
        if split.codes == 0:
            if not split.complete:  # there was no room for it
                add_range(work, parent, work.ranges[split.range].row)
            continue
        for i in range(split.codes):
            code = work.codes[split.first_code + i]
            if code > 0:  # nothing follows the end of a document
                add_candidate(work, tree, parent, code, work.row_count + 2 * i + 1)
        if not split.complete:
            for i in range(split.codes + 1):
                add_range(work, parent, work.row_count + 2 * i)
        work.row_count += 2 * split.codes + 1

cdef void grow(
    Selection* work, const Interval* match, int32_t length, int32_t depth, Tree* tree
) noexcept nogil:
    """Add the most frequent continuations of a match to a tree."""
    cdef int32_t e, s
    work.length, work.depth, work.wanted = length, depth, tree.capacity - tree.size
    work.range_count = work.frontier_size = work.best_size = 0
    work.candidate_count = work.row_count = 1
    for s in range(work.shard_count):
        work.rows[s] = match[s]
    work.candidates[0] = Candidate(total(work, 0), 0, -1, 0, 0, 0, 0, -1)
    if depth > 0:
        add_range(work, 0, 0)
    while work.frontier_size > 0 and work.codes_left > 0:
        plan_batch(work)
        if work.split_count == 0:
            break
        read_samples(work)
        for e in range(work.split_count):
            choose_codes(work, &work.splits[e])
        for s in range(work.shard_count):
            cut_shard(work, s)
        collect(work, tree)
    take_best(work, tree)
