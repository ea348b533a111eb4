"""Solutions to the exercises of the chapter on the roofline."""
import math


# --8<-- [start:quantized]
def mixed_intensity(m, n, k, a_bytes, b_bytes, c_bytes):
    """FLOP a byte of C = A @ B whose elements take different space.

    m, n, k: positive integers. a_bytes, b_bytes, c_bytes: bytes an element
    of A, B and C; a fraction is fine (a 4-bit weight takes 0.5).
    """
    for name, value in (("m", m), ("n", n), ("k", k), ("a_bytes", a_bytes),
                        ("b_bytes", b_bytes), ("c_bytes", c_bytes)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    moved = a_bytes * m * k + b_bytes * k * n + c_bytes * m * n
    return 2 * m * n * k / moved


def tokens_to_compute_bound(n, k, ridge, weight_bytes, act_bytes=2):
    """The least whole m whose intensity reaches the ridge; inf if none does.

    ridge: FLOP/B. weight_bytes: of an element of B. act_bytes: of A and C.
    """
    if not ridge > 0:
        raise ValueError(f"ridge must be positive, got {ridge}")
    mixed_intensity(1, n, k, act_bytes, weight_bytes, act_bytes)  # checks
    # 2 m n k >= ridge * (act * m * (n + k) + weight * n * k)
    gain = 2 * n * k - ridge * act_bytes * (n + k)    # FLOP to spare a token
    if gain <= 0:
        return math.inf
    return max(1, math.ceil(ridge * weight_bytes * n * k / gain))
# --8<-- [end:quantized]


# --8<-- [start:chain]
def chain_floor(n, ops, itemsize, fused, *, bandwidth, overhead):
    """Seconds that `ops` pointwise operations on n elements take at least.

    Unfused, each operation is a launch that reads and writes all elements;
    fused, one launch does that once. A launch takes the longer of its
    overhead and its transfer. bandwidth: B/s. overhead: seconds.
    """
    for name, value in (("n", n), ("ops", ops), ("itemsize", itemsize),
                        ("bandwidth", bandwidth)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if not overhead >= 0:
        raise ValueError(f"overhead must not be negative, got {overhead}")
    launches = 1 if fused else ops
    return launches * max(overhead, 2 * n * itemsize / bandwidth)


def break_even(itemsize, *, bandwidth, overhead):
    """The number of elements whose transfer takes as long as a launch."""
    if not (itemsize > 0 and bandwidth > 0 and overhead >= 0):
        raise ValueError("itemsize and bandwidth must be positive, overhead "
                         f"not negative: {itemsize}, {bandwidth}, {overhead}")
    return overhead * bandwidth / (2 * itemsize)
# --8<-- [end:chain]
