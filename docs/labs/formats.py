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
# # Lab: number formats by hand
#
# Install NumPy (`pip install numpy`) and run the cells from top to bottom. You take numbers apart into their bits, build
# bf16 and an 8-bit format yourself, and watch sums stop growing. Nothing is timed and nothing is downloaded.

# %%
import numpy as np

# %% [markdown]
# ## 1. Take an fp16 number apart
#
# A view changes the type and keeps the bits. From the most significant bit on: one sign, five exponent bits, ten mantissa bits.


# %%
def parts(x):
    code = int(np.array(x, np.float16).view(np.uint16))
    return code >> 15, code >> 10 & 31, code & 1023


for x in (1.0, 1.5, -2.0, 0.1, 65504.0, 2.0**-14, 2.0**-24, np.inf, np.nan):
    sign, exponent, mantissa = parts(x)
    print(f"{x!s:>22}: sign {sign}  exponent {exponent:05b}  mantissa {mantissa:010b}")

# %% [markdown]
# Before you run the next cell: which of these becomes infinity?

# %%
with np.errstate(over="ignore"):
    for x in (65504, 65519, 65520, 65536):
        print(x, "->", float(np.float32(x).astype(np.float16)))

# %% [markdown]
# The next number after 65504 would be 65536, if there were one. 65520 lies halfway between them, the tie goes to the even code, and that
# one means infinity.
#
# ## 2. Build bf16 from fp32
#
# bf16 is the upper 16 bits of fp32. Cutting the rest off would always round toward zero, so a little less than one step of the
# last kept bit, over two, is added first, and the last kept bit itself decides a tie. (NaN would need a case of its own: the addition
# can carry its bits into another number.)


# %%
def to_bf16(x):
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + (bits >> 16 & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


for x in (1.0, 3.14159265, 256.0, 257.0, 259.0, 1e38):
    print(f"{x:>12g} -> {to_bf16([x])[0]:g}")

# %% [markdown]
# ## 3. Build any small format
#
# With the number of exponent bits and of mantissa bits you can list every number of a format. `e4m3fn` gives one code of each sign to NaN
# and none to infinity, which is why its largest number is 448 and not 240.


# %%
def numbers(exponent, mantissa, fn):
    bias, found = 2 ** (exponent - 1) - 1, []
    top = 2 ** (exponent + mantissa) - (1 if fn else 2**mantissa)
    for code in range(top):
        e, m = divmod(code, 2**mantissa)
        whole = m if e == 0 else 2**mantissa + m  # subnormal: no leading one
        found.append(whole * 2.0 ** (max(e, 1) - bias - mantissa))
    return np.array(found)


e4m3fn, e5m2 = numbers(4, 3, True), numbers(5, 2, False)
print("e4m3fn:", len(e4m3fn), "numbers from 0 to", e4m3fn[-1], " smallest", e4m3fn[1])
print("e5m2:  ", len(e5m2), "numbers from 0 to", e5m2[-1], " smallest", e5m2[1])
half = numbers(5, 10, False)
codes = np.arange(len(half), dtype=np.uint16)
assert np.array_equal(half, codes.view(np.float16).astype(np.float64))
print("fp16 built the same way agrees with NumPy on all", len(half), "codes")

# %% [markdown]
# ## 4. Where the numbers lie
#
# Steps grow with the number: each power of two has equally many. Draw them and compare with int8, whose steps are all alike.

# %%
from IPython.display import HTML

rows = (("int8", np.arange(128.0)), ("e4m3fn", e4m3fn), ("e5m2", e5m2))
marks = ""
for i, (name, values) in enumerate(rows):
    marks += f'<text x="0" y="{40 * i + 25}" font-size="18" fill="currentColor">{name}</text>'
    for x in 70 + values / values[-1] * 600:
        marks += f'<path d="M{x:.1f} {40 * i + 6}v26" stroke="#3778b4"/>'
title = "Levels of int8, e4m3fn and e5m2 from 0 to the largest; those of e4m3fn and e5m2 crowd near 0"
HTML(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 690 120" role="img"><title>{title}</title>{marks}</svg>')

# %% [markdown]
# ## 5. A sum that stops
#
# Add ones in fp16. Guess where the sum ends, then run the cell.

# %%
total = np.float16(0)
for _ in range(5000):
    total = np.float16(total + np.float16(1))
print("5000 ones, one after another:", float(total))
print("the same ones in fp32:      ", np.ones(5000, np.float16).sum(dtype=np.float32))

# %% [markdown]
# At 2048 the step of fp16 is 2. Adding 1 is a tie, it goes to the even code, and the sum stays. Adding neighbors first avoids it,
# because the two numbers of each addition are of like size:


# %%
def pairwise(x):
    while len(x) > 1:
        x = np.append(x, x.dtype.type(0)) if len(x) % 2 else x
        x = x[0::2] + x[1::2]
    return x[0]


print("5000 ones, pairwise:        ", float(pairwise(np.ones(5000, np.float16))))

# %% [markdown]
# ## 6. A norm of zeros
#
# RMSNorm divides by the root of the mean square. With activations of 300 the square is 90 000, which fp16 does not hold.

# %%
x = np.full(5120, 300, np.float16)
with np.errstate(over="ignore"):
    mean = np.mean(x * x, dtype=np.float16)
print("mean square in fp16:", mean, " output:", (x / np.sqrt(mean))[0])
wide = x.astype(np.float32)
mean = np.mean(wide * wide)
print("mean square in fp32:", mean, " output:", (wide / np.sqrt(mean)).astype(np.float16)[0])

# %% [markdown]
# ## 7. A byte each, and a scale
#
# Hold a row of weights in 8 bits: divide by a scale so that the largest one hits the end of the format, round, multiply back.


# %%
def hold(w, levels):
    scale = np.abs(w).max() / levels[-1]
    table = np.unique(np.concatenate([-levels, levels]))
    nearest = table[np.abs(w[:, None] / scale - table).argmin(axis=1)]
    return nearest * scale


rng = np.random.default_rng(0)
plain = rng.standard_normal(2000)
outlier = np.append(plain, 100.0)
for name, levels in rows:
    off = [np.linalg.norm((hold(w, levels) - w)[:2000]) for w in (plain, outlier)]
    lost = off / np.linalg.norm(plain)
    print(f"{name:<7} relative error {lost[0]:.4f}, with one outlier of 100 {lost[1]:.4f}")

# %% [markdown]
# Without an outlier, the equal steps of int8 suit these weights best. One outlier makes each of those steps wider, and int8 loses most. The
# floating-point formats hardly notice it: their steps shrink toward zero, so a row squeezed toward zero keeps its digits.
#
# ## Now you
#
# 1. `numbers(2, 1, True)`: how many numbers has a format of 4 bits, and what are they? The fp4 of
#    current hardware is the same format with its last code spent on 6 in place of NaN.
# 2. Give each block of 64 weights a scale of its own and measure the error of the row with the outlier again. The next cell holds one answer.

# %%
padded = np.append(outlier, np.zeros(-len(outlier) % 64))
for name, levels in rows:
    blocks = np.concatenate([hold(block, levels) for block in padded.reshape(-1, 64)])
    off = np.linalg.norm((blocks - padded)[:2000])
    print(f"{name:<7} in blocks of 64: {off / np.linalg.norm(plain):.4f}")
print("numbers of 4 bits:", numbers(2, 1, True))
