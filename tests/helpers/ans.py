"""Entropy-coded codes as docs/file-format.md defines them, written by its rule alone: to make files by hand."""

TOTAL = 2**24


def table(counts: list[int]) -> bytes:
    """The counts of all centroids; what a file may not say can be given, too."""
    numbers = [count - after + 1 for count, after in zip(counts, [*counts[1:], 0], strict=True)][::-1]
    bits = "".join("0" * (number.bit_length() - 1) + bin(number)[2:][0] + bin(number)[3:][::-1] for number in numbers)
    return int("0" + bits[::-1], 2).to_bytes(-(-len(bits) // 8), "little")


def intervals(counts: list[int]) -> list[tuple[int, int]]:
    """Where the interval of each centroid begins, and how long it is."""
    used = [count for count in counts if count]
    lengths = [1 + count * (TOTAL - len(used)) // sum(used) for count in used]
    lengths[0] += TOTAL - sum(lengths)
    return [(sum(lengths[:i]), length) for i, length in enumerate(lengths)]


def words(codes: list[int], counts: list[int]) -> bytes:
    """The codes, with the frequencies that follow from the counts."""
    state, out, own = 0, [], intervals(counts)
    for code in reversed(codes):
        begin, length = own[code]
        if state >> 40 >= length:
            out.append(state % 2**32)
            state >>= 32
        state = (state // length << 24) + begin + state % length
    while state:
        out.append(state % 2**32)
        state >>= 32
    return b"".join(word.to_bytes(4, "little") for word in out)


def encoded(codes: list[int], k: int) -> bytes:
    """The array `codes/NAME`; of the codes, a smaller one must be at least as frequent as a larger one."""
    counts = [codes.count(code) for code in range(k)]
    return table(counts) + words(codes, counts)
