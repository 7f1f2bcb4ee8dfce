"""Files that are not what they were."""

INTERESTING = [
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\0\0\0\x80",
    b"\1",
    b"{",
    b'"',
]


def damaged(data, rng):
    """Some bytes of a file changed, inserted, left out, repeated, exchanged or cut off."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        place, length = rng.randrange(len(data) + 1), rng.choice([1, 2, 4, 8, 64])
        end = min(place + length, len(data))
        match rng.randrange(7):
            case 0:
                data[place:end] = rng.randbytes(end - place)
            case 1:
                data[place:end] = rng.choice(INTERESTING)
            case 2:
                data[place:place] = rng.randbytes(length)
            case 3:
                del data[place:end]
            case 4:
                data[place:place] = data[place:end]
            case 5:
                other = rng.randrange(len(data) + 1)
                data[other : other + end - place] = data[place:end]
            case 6:
                del data[place:]
    return bytes(data)
