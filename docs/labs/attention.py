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
# # Lab: attention, one tile at a time
#
# Install NumPy (`pip install numpy`) and run the cells from top to bottom. Nothing else is needed: no GPU, no
# download. Nothing is timed here; the chapter *Attention, derived* has the measured figures. Here you build attention from its
# steps, then take the matrix of scores away and keep the result.

# %%
import numpy as np

rng = np.random.default_rng(0)
M, N, D = 4, 10, 8  # queries, keys, features
q, k, v = 2 * rng.standard_normal((M, D)), rng.standard_normal((N, D)), rng.standard_normal((N, D))

# %% [markdown]
# ## 1. Six steps
#
# Scores, scale, mask, weights, sums, output. Before you run the cell: which axis is the softmax over, and what do its weights add up to?

# %%
scores = q @ k.T / np.sqrt(D)
weights = np.exp(scores - scores.max(axis=1, keepdims=True))
weights = weights / weights.sum(axis=1, keepdims=True)
out = weights @ v
print("scores", scores.shape, " sums of the rows:", weights.sum(axis=1), " output", out.shape)

# %% [markdown]
# ## 2. Why the largest score is subtracted
#
# It changes nothing on paper. Multiply the scores by a thousand and look at both forms.

# %%
with np.errstate(over="ignore", invalid="ignore"):
    plain = np.exp(1000 * scores) / np.exp(1000 * scores).sum(axis=1, keepdims=True)
shifted = np.exp(1000 * (scores - scores.max(axis=1, keepdims=True)))
shifted = shifted / shifted.sum(axis=1, keepdims=True)
print("NaN without the shift:", int(np.isnan(plain).sum()), " with it:", int(np.isnan(shifted).sum()))

# %% [markdown]
# ## 3. One tile at a time
#
# Three things a query are enough to go on: `m`, the largest score so far; `l`, the sum of the weights against it; `acc`, the
# weighted sum of the values. When a larger score turns up, both sums are multiplied by `exp(old m - new m)`.


# %%
def step(m, l, acc, scores, v):
    m_new = np.maximum(m, scores.max(axis=1, keepdims=True))
    alpha = np.exp(m - m_new)
    w = np.exp(scores - m_new)
    return m_new, l * alpha + w.sum(axis=1, keepdims=True), acc * alpha + w @ v


def online(q, k, v, tile):
    m, l, acc = np.full((len(q), 1), -np.inf), np.zeros((len(q), 1)), np.zeros((len(q), v.shape[1]))
    for start in range(0, len(k), tile):
        here = slice(start, start + tile)
        m, l, acc = step(m, l, acc, q @ k[here].T / np.sqrt(q.shape[1]), v[here])
        print(f"  keys up to {min(start + tile, len(k)):>2}: first query has m = {m[0, 0]:.4f}, l = {l[0, 0]:.4f}, output so far {np.round(acc[0, :3] / l[0, 0], 4)}")
    return acc / l


for tile in (1, 3, 4, 100):
    print("tile", tile)
    print("  right:", np.allclose(online(q, k, v, tile), out))

# %% [markdown]
# ## 4. Three suspects
#
# Each line after the first departs from the algorithm in one thing. Which of them is wrong, and which would you have noticed in a
# model's output?

# %%
tile = 4


def faulty(rescale=True, fill=-np.inf, keep_m=True):
    m, l, acc = np.full((M, 1), -np.inf), np.zeros((M, 1)), np.zeros((M, D))
    for start in range(0, N, tile):
        s = np.full((M, tile), fill)
        value = np.zeros((tile, D))
        n = min(tile, N - start)
        s[:, :n], value[:n] = q @ k[start : start + n].T / np.sqrt(D), v[start : start + n]
        m_new = np.maximum(m, s.max(axis=1, keepdims=True)) if keep_m else s.max(axis=1, keepdims=True)
        alpha = np.exp(m - m_new) if rescale else 1.0
        w = np.exp(s - m_new)
        m, l, acc = m_new, l * alpha + w.sum(axis=1, keepdims=True), acc * alpha + w @ value
    return acc / l


for name, result in (
    ("nothing left out", faulty()),
    ("old sums not rescaled", faulty(rescale=False)),
    ("short tile filled with scores of 0", faulty(fill=0.0)),
    ("m of the tile alone, sums rescaled to it", faulty(keep_m=False)),
):
    error = np.linalg.norm(result - out) / np.linalg.norm(out)
    print(f"{name:<42} relative error {error:.1e}")

# %% [markdown]
# The last line is right. `m` need not be the largest score: any base that both sums share cancels in `acc / l`. The largest one is
# chosen because it keeps every exponent at or below zero. Now make the first tile's scores a thousand larger than the others', and
# see what the last form does.

# %% [markdown]
# ## 5. A mask, and a row with no key
#
# A key that is hidden gets a score of minus infinity, and `exp(-inf)` is 0. A query that sees no key at all is an empty sum over an
# empty sum: the formula says 0 / 0. The book returns zeros there, as torch does for a mask of booleans. Watch what the
# bare formula does, and where.

# %%
allowed = np.tril(np.ones((M, N), bool), N - M)
allowed[1] = False
masked = np.where(allowed, scores, -np.inf)
with np.errstate(invalid="ignore"):
    w = np.exp(masked - masked.max(axis=1, keepdims=True))  # row 1: -inf - (-inf)
print("NaN in the bare formula, by row:", np.isnan(w).sum(axis=1))

top = masked.max(axis=1, keepdims=True)
w = np.exp(masked - np.where(np.isneginf(top), 0, top))
total = w.sum(axis=1, keepdims=True)
result = np.divide(w @ v, total, out=np.zeros((M, D)), where=total > 0)
print("row 1 by the rule:", result[1])

# %% [markdown]
# ## 6. What is kept
#
# Count numbers, not seconds: the elements that are alive at the worst moment, for N queries and N keys.

# %%
print(f"{'N':>7} {'all scores':>14} {'tiles of 64':>12} {'m, l, acc':>11}")
for n in (256, 1024, 4096, 16384):
    print(f"{n:>7} {n * n:>14} {n * 64:>12} {n * (D + 2):>11}")

# %% [markdown]
# ## Now you
#
# 1. Process the tiles from last to first. Why may you?
# 2. Split the keys into two halves, run `step` over each from scratch, and combine the two states into one. The next cell holds
#    one answer. It is how a long cache is read by many processors at once.

# %%


def merge(a, b):
    m = np.maximum(a[0], b[0])
    x, y = np.exp(a[0] - m), np.exp(b[0] - m)
    return m, a[1] * x + b[1] * y, a[2] * x + b[2] * y


nothing = np.full((M, 1), -np.inf), np.zeros((M, 1)), np.zeros((M, D))
first, second = step(*nothing, scores[:, :6], v[:6]), step(*nothing, scores[:, 6:], v[6:])
m, l, acc = merge(first, second)
print("halves, merged:", np.allclose(acc / l, out), " the other way around:", np.allclose(merge(second, first)[2] / merge(second, first)[1], out))
