# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab: three loops to BLAS
#
# Install NumPy (`pip install numpy`) and run the cells from top to bottom. Nothing else is needed: no GPU, no
# compiler, no download. Nothing is timed here; the chapter *Three loops* has the measured figures. Here you count
# operations, check results, and see how the same product is laid out in memory.

# %%
import numpy as np

rng = np.random.default_rng(0)
M, N, K = 4, 5, 3
A = rng.integers(-3, 4, (M, K)).astype(np.float64)
B = rng.integers(-3, 4, (K, N)).astype(np.float64)
print("A\n", A, "\nB\n", B)

# %% [markdown]
# The sizes differ on purpose, so that a swapped index shows. The entries are small integers: every order of adding gives
# the same bits, and a check may ask for equality.
#
# ## 1. Three loops
#
# Before you run the cell: how many multiplications will it count?


# %%
def triple_loop(A, B):
    """A @ B, and the number of multiplications."""
    M, K = A.shape
    K_of_B, N = B.shape
    if K != K_of_B:
        raise ValueError(f"A has {K} columns and B has {K_of_B} rows")
    C = np.zeros((M, N))
    count = 0
    for i in range(M):
        for j in range(N):
            for k in range(K):
                C[i, j] += A[i, k] * B[k, j]
                count += 1
    return C, count


C, count = triple_loop(A, B)
print(C)
print("multiplications:", count, " M * N * K:", M * N * K)

# %% [markdown]
# ## 2. A check that can fail
#
# Comparing `A @ B` with `A @ B` proves nothing. Compare with something computed another way, and show that a wrong version
# is caught. The wrong one here takes the elements of B column by column where it should take them row by row:

# %%
reference = np.einsum("ik,kj->ij", A.astype(int), B.astype(int))
print("loops agree:", bool((C == reference).all()))

wrong = A @ B.T.reshape(K, N)
print("the wrong version agrees:", bool((wrong == reference).all()))

# %% [markdown]
# ## 3. The same sum, in three shapes
#
# Which index is innermost decides what the inner loop *is*: a dot product, or a multiple of a row added to a row, or a multiple of
# a column added to a column. NumPy can do the inner loop, or the two inner loops, in one call. How many steps are left to Python?

# %%
by_dot = np.zeros((M, N))
for i in range(M):
    for j in range(N):
        by_dot[i, j] = np.dot(A[i], B[:, j])  # k inside

by_row = np.zeros((M, N))
for i in range(M):
    for k in range(K):
        by_row[i] += A[i, k] * B[k]  # j inside

by_outer = np.zeros((M, N))
for k in range(K):
    by_outer += np.outer(A[:, k], B[k])  # i and j inside

print(f"{'version':<16} {'Python steps':>12}  right")
for name, out, steps in (
    ("triple loop", C, M * N * K),
    ("dot", by_dot, M * N),
    ("row to row", by_row, M * K),
    ("outer product", by_outer, K),
    ("A @ B", A @ B, 1),
):
    print(f"{name:<16} {steps:>12}  {bool((out == reference).all())}")

# %% [markdown]
# ## 4. Where the elements lie
#
# A view is a shape, strides in bytes, and a place where it begins. The cell prints the address of each element, relative to the
# first one of the buffer, in elements.


# %%
def places(view, base):
    start = view.ctypes.data - base.ctypes.data  # bytes from base to view
    index = np.indices(view.shape)
    offsets = sum(i * stride for i, stride in zip(index, view.strides, strict=True))
    return (start + offsets) // base.itemsize


base = np.arange(24.0).reshape(4, 6)
for name, view in (
    ("base", base),
    ("base.T", base.T),
    ("base[1:3, 2:5]", base[1:3, 2:5]),
    ("base[:, ::2]", base[:, ::2]),
    ("base[::-1]", base[::-1]),
    ("base[0], broadcast", np.broadcast_to(base[0], (3, 6))),
):
    print(f"{name}: shape {view.shape}, strides {view.strides}")
    print(places(view, base))
    # base holds 0, 1, 2 ...: the value of each element is its own place
    assert (places(view, base) == view).all()

# %% [markdown]
# ## 5. Draw one
#
# A map of the buffer: cells that the view uses are filled. Change the view and run the cell again.

# %%
from IPython.display import HTML

view = base[1:3, 2:5]
used = set(places(view, base).ravel().tolist())
cells = ""
for p in range(base.size):
    x, y = p % 12 * 40 + 1, p // 12 * 40 + 1
    fill, ink = ("#9ec5e8", "#111") if p in used else ("none", "#777")
    cells += (
        f'<rect x="{x}" y="{y}" width="40" height="40" fill="{fill}" stroke="#777"/>'
        f'<text x="{x + 20}" y="{y + 25}" text-anchor="middle" font-size="14" '
        f'fill="{ink}">{p}</text>'
    )
title = f"The places {sorted(used)} of a buffer of {base.size} are used"
HTML(
    '<svg xmlns="http://www.w3.org/2000/svg" width="482" height="82" role="img">'
    f"<title>{title}</title>{cells}</svg>"
)

# %% [markdown]
# ## 6. How many cache lines does a walk touch?
#
# A processor fetches memory in lines, of 64 bytes here. Take a matrix of 64 x 64 elements of 8 bytes. How many lines hold one
# row of it? How many hold one column? And a tile of 8 x 8, which has as many elements as either? Guess, then run the cell.


# %%
def lines(view, base):
    first_bytes = places(view, base) * base.itemsize
    return len(np.unique(first_bytes // 64))


big = np.zeros((64, 64))
for name, view in (
    ("a row", big[0]),
    ("a column", big[:, 0]),
    ("a tile of 8 x 8", big[:8, :8]),
):
    print(f"{name:<15} {view.size} elements in {lines(view, big)} lines")

# %% [markdown]
# The row and the tile use all of each line. The column uses one element of eight, and the rest of the line is fetched for nothing
# unless the neighboring columns are walked soon. A tile gives you both directions: that is why fast products work on tiles.
#
# ## 7. GEMM
#
# `C = alpha * A @ B + beta * C`, in place. With `beta = 0` an output full of NaN must not leak into the result. The formula as printed
# leaks; the fixed version assigns.

# %%
alpha, beta = 1.0, 0.0
C = np.full((M, N), np.nan)
formula = alpha * (A @ B) + beta * C
print("NaN by the formula:", int(np.isnan(formula).sum()), "of", C.size)

C[...] = 0 if beta == 0 else beta * C
C += alpha * (A @ B)
print("NaN by the rule:", int(np.isnan(C).sum()), " right:", bool((C == reference).all()))

# %% [markdown]
# ## Now you
#
# 1. Make `M`, `N` and `K` primes of your own, and one of them 0. Which cells still run, and what do they say?
# 2. Write `blocked(A, B, block)`: six loops, three over blocks and three inside, and count its multiplications. It must agree with
#    the reference for a block that does not divide the sizes. The next cell holds one answer.


# %%
def blocked(A, B, block):
    (M, K), N = A.shape, B.shape[1]
    C, count = np.zeros((M, N)), 0
    for i0 in range(0, M, block):
        for k0 in range(0, K, block):
            for j0 in range(0, N, block):
                i, j, k = (slice(at, at + block) for at in (i0, j0, k0))
                part, done = triple_loop(A[i, k], B[k, j])  # slices stop at the edge
                C[i, j] += part
                count += done
    return C, count


for block in (1, 2, 3, 100):
    out, count = blocked(A, B, block)
    right = bool((out == reference).all())
    print(f"block {block}: right {right}, multiplications {count}")
