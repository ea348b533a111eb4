"""Matrix product in Triton, in four steps: masks, grouped order, autotuned, TMA descriptors with persistent programs.

Shows: tl.dot with an fp32 accumulator, masks along M, N and K, program order and the L2, the autotuner and its key,
tensor descriptors and when they are not allowed, a fused epilogue, and what tuning does to an output that accumulates.
Needs: pip install torch triton (Linux; an NVIDIA GPU; the last step needs a Hopper or newer, the others run on any;
with TRITON_INTERPRET=1 set before the import everything but bf16 and the tuning runs on a processor)
Run:   python gemm.py            (check and time every case)
       python gemm.py --sweep    (TFLOP/s of every configuration listed below)
Source: the grouped order is that of Triton's matrix product, https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html
SPDX-License-Identifier: MIT
"""
import argparse
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system: the file still imports, and matmul() says what is missing
    triton = SimpleNamespace(jit=lambda fn=None, **_: (lambda f: None) if fn is None else None, JITFunction=object,
                             autotune=lambda **_: lambda fn: None, Config=lambda *_, **__: None)
    tl = SimpleNamespace(constexpr=int)

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None

NEEDS = "gpu sm>=90, 8 GiB"  # the last step; v1 to v3 run on older GPUs as well

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PRECISIONS = ("ieee", "tf32", "tf32x3")
ACTIVATIONS = (None, "relu", "gelu")

# --8<-- [start:configs]
# BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, num_warps, num_stages
V3_CONFIGS = [
    (128, 256, 64, 8, 8, 3),
    (128, 256, 64, 8, 8, 4),
    (128, 64, 64, 8, 4, 4),
    (64, 128, 64, 8, 4, 5),
]
FP32_CONFIGS = [            # four bytes an element, and IEEE needs registers
    (64, 64, 32, 8, 4, 3),
    (128, 64, 32, 8, 4, 3),
    (32, 32, 32, 8, 4, 3),
]
# the same, then PERSISTENT (one program an SM, or one a tile) and PIECES
V4_CONFIGS = [
    (128, 256, 64, 8, 8, 4, False, 1),
    (128, 128, 64, 8, 4, 3, False, 1),
    (128, 64, 128, 8, 4, 4, False, 1),
    (64, 128, 128, 8, 4, 4, False, 1),
    (128, 256, 64, 8, 8, 3, True, 1),
    (128, 256, 64, 16, 8, 4, True, 2),
]
# --8<-- [end:configs]
FIXED = (128, 256, 64, 8, 8, 3)  # of v1 and v2, for two-byte types


# --8<-- [start:multiply]
@triton.jit
def multiply(a, b, row, col, M, N, K, a_row, a_col, b_row, b_col,
             PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    x_at = a + row[:, None] * a_row + k[None, :] * a_col  # [BLOCK_M, BLOCK_K]
    y_at = b + k[:, None] * b_row + col[None, :] * b_col  # [BLOCK_K, BLOCK_N]
    x_step = tl.cast(a_col, tl.int64) * BLOCK_K
    y_step = tl.cast(b_row, tl.int64) * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        left = k < K - k0                      # what is left of K, each step
        x = tl.load(x_at, mask=(row < M)[:, None] & left[None, :], other=0.0)
        y = tl.load(y_at, mask=left[:, None] & (col < N)[None, :], other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
        x_at += x_step
        y_at += y_step
    return acc
# --8<-- [end:multiply]


# --8<-- [start:v1]
@triton.jit
def v1_kernel(a, b, c, M, N, K, a_row, a_col, b_row, b_col, c_row, c_col,
              PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    tile, across = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    i, j = tile // across, tile % across       # row after row
    row = i.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = j.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = multiply(a, b, row, col, M, N, K, a_row, a_col, b_row, b_col,
                   PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    at = c + row[:, None] * c_row + col[None, :] * c_col
    tl.store(at, acc, mask=(row < M)[:, None] & (col < N)[None, :])
# --8<-- [end:v1]


# --8<-- [start:grouped]
@triton.jit
def grouped(tile, down, across, GROUP_M: tl.constexpr):
    """Tile number -> (row, column): GROUP_M rows high, column by column."""
    size = GROUP_M * across                    # tiles in a full group
    first = tile // size * GROUP_M             # its first row of tiles
    height = min(down - first, GROUP_M)        # the last group may be lower
    return first + tile % size % height, tile % size // height
# --8<-- [end:grouped]


# --8<-- [start:v2]
@triton.jit
def v2_kernel(a, b, c, M, N, K, a_row, a_col, b_row, b_col, c_row, c_col,
              PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
              GROUP_M: tl.constexpr):
    i, j = grouped(tl.program_id(0), tl.cdiv(M, BLOCK_M),
                   tl.cdiv(N, BLOCK_N), GROUP_M)               # new
    row = i.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = j.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = multiply(a, b, row, col, M, N, K, a_row, a_col, b_row, b_col,
                   PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    at = c + row[:, None] * c_row + col[None, :] * c_col
    tl.store(at, acc, mask=(row < M)[:, None] & (col < N)[None, :])
# --8<-- [end:v2]


# --8<-- [start:finish]
@triton.jit
def finish(acc, row, col, M, N, bias, residual, r_row, r_col,
           ACTIVATION: tl.constexpr):
    """activation(acc + bias) + residual, in fp32, in registers."""
    if bias is not None:
        v = tl.load(bias + col, mask=col < N, other=0.0)
        acc += v.to(tl.float32)[None, :]
    if ACTIVATION == "relu":
        acc = tl.where(acc < 0, 0.0, acc)      # keeps NaN
    if ACTIVATION == "gelu":
        acc = 0.5 * acc * (1 + tl.erf(acc * 0.7071067811865476))
    if residual is not None:
        at = residual + row[:, None] * r_row + col[None, :] * r_col
        inside = (row < M)[:, None] & (col < N)[None, :]
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return acc
# --8<-- [end:finish]


def _config(blocks, hook=None):
    """A tuple of the lists above as a triton.Config."""
    m, n, k, group, warps, stages, *more = blocks
    names = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group}
    names |= dict(zip(("PERSISTENT", "PIECES"), more, strict=False))
    return triton.Config(names, num_warps=warps, num_stages=stages, pre_hook=hook)


# --8<-- [start:prune]
def prune(configs, args, **_):
    """Of v3's configurations, those for the inputs' size of element."""
    wanted = FP32_CONFIGS if args["a"].element_size() == 4 else V3_CONFIGS
    return [c for c in configs if _blocks(c) in wanted]
# --8<-- [end:prune]


def _blocks(config):
    """A triton.Config as a tuple of the lists above."""
    kw = config.kwargs
    head = (kw["BLOCK_M"], kw["BLOCK_N"], kw["BLOCK_K"], kw["GROUP_M"], config.num_warps, config.num_stages)
    return head + ((kw["PERSISTENT"], kw["PIECES"]) if "PERSISTENT" in kw else ())


# --8<-- [start:trial]
def in_a_graph(trial, quantiles):
    """Time a trial launched from a CUDA graph, so that Python's share of a
    launch, the same for every configuration, hides none of them."""
    return triton.testing.do_bench_cudagraph(trial, quantiles=quantiles)
# --8<-- [end:trial]


# --8<-- [start:v3]
@triton.autotune(
    configs=[_config(blocks) for blocks in V3_CONFIGS + FP32_CONFIGS],
    key=["situation"],                         # tune again when this changes
    prune_configs_by={"early_config_prune": prune},
    do_bench=in_a_graph,
)
@triton.jit(do_not_specialize=["situation"])   # a number, not a new version
def v3_kernel(a, b, c, bias, residual, M, N, K, a_row, a_col, b_row, b_col,
              c_row, c_col, r_row, r_col, situation,
              PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    i, j = grouped(tl.program_id(0), tl.cdiv(M, BLOCK_M),
                   tl.cdiv(N, BLOCK_N), GROUP_M)
    row = i.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = j.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = multiply(a, b, row, col, M, N, K, a_row, a_col, b_row, b_col,
                   PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    acc = finish(acc, row, col, M, N, bias, residual, r_row, r_col, ACTIVATION)
    at = c + row[:, None] * c_row + col[None, :] * c_col
    tl.store(at, acc, mask=(row < M)[:, None] & (col < N)[None, :])
# --8<-- [end:v3]


# --8<-- [start:v4_tile]
@triton.jit
def tma_tile(a, b, c, bias, residual, tile, M, N, K, r_row, r_col,
             A_T: tl.constexpr, B_T: tl.constexpr, ACTIVATION: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
             PIECES: tl.constexpr):
    i, j = grouped(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m, n = i * BLOCK_M, j * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):             # no pointers, no masks
        x = a.load([k, m]).T if A_T else a.load([m, k])
        y = b.load([n, k]).T if B_T else b.load([k, n])
        acc = tl.dot(x, y, acc)
    row = m.to(tl.int64) + tl.arange(0, BLOCK_M)
    col = n.to(tl.int64) + tl.arange(0, BLOCK_N // PIECES)
    if PIECES == 2:                            # a smaller buffer for C
        acc = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        acc, right = tl.split(acc)
        right = finish(right, row, col + BLOCK_N // 2, M, N, bias, residual,
                       r_row, r_col, ACTIVATION)
        c.store([m, n + BLOCK_N // 2], right.to(c.dtype))
    acc = finish(acc, row, col, M, N, bias, residual, r_row, r_col, ACTIVATION)
    c.store([m, n], acc.to(c.dtype))           # clipped at M and N
# --8<-- [end:v4_tile]


def without_room(configs, args, **_):
    """An epilogue that reads a residual needs shared memory of its own, which persistent programs do not have left."""
    tight = args["residual"] is not None
    return [c for c in configs if not (tight and c.kwargs["PERSISTENT"])] or configs


# --8<-- [start:v4]
def set_block_shapes(args):
    """Before each trial: the descriptors must know the tile's size."""
    m, n, k = args["BLOCK_M"], args["BLOCK_N"], args["BLOCK_K"]
    args["a"].block_shape = [k, m] if args["A_T"] else [m, k]
    args["b"].block_shape = [n, k] if args["B_T"] else [k, n]
    args["c"].block_shape = [m, n // args["PIECES"]]


@triton.autotune(
    configs=[_config(blocks, set_block_shapes) for blocks in V4_CONFIGS],
    key=["situation"],
    prune_configs_by={"early_config_prune": without_room},
    do_bench=in_a_graph,
)
@triton.jit(do_not_specialize=["situation"])
def v4_kernel(a, b, c, bias, residual, M, N, K, r_row, r_col, situation,
              A_T: tl.constexpr, B_T: tl.constexpr, ACTIVATION: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
              PERSISTENT: tl.constexpr, PIECES: tl.constexpr):
    if PERSISTENT:                             # one program an SM
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0),
                             flatten=True):    # next loads before last stores
            tma_tile(a, b, c, bias, residual, tile, M, N, K, r_row, r_col,
                     A_T, B_T, ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K,
                     GROUP_M, PIECES)
    else:                                      # one program a tile
        tma_tile(a, b, c, bias, residual, tl.program_id(0), M, N, K, r_row,
                 r_col, A_T, B_T, ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K,
                 GROUP_M, PIECES)
# --8<-- [end:v4]


INTERPRETED = v1_kernel is not None and not isinstance(v1_kernel, triton.JITFunction)


def _check(name, t, like=None, ndim=2):
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s), got shape {tuple(t.shape)}")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {t.dtype}")
    if not t.is_cuda and not INTERPRETED:
        raise ValueError(f"{name} is on {t.device}: move it to a GPU, or set TRITON_INTERPRET=1 before the import")
    if INTERPRETED and t.dtype == torch.bfloat16:
        raise TypeError(f"{name} is bfloat16: the interpreter multiplies its bit patterns; use a GPU")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad, and this product has no backward pass")
    if like is not None and (t.dtype, t.device) != (like.dtype, like.device):
        raise ValueError(f"{name} is {t.dtype} on {t.device}, a is {like.dtype} on {like.device}")


def _check_shape(name, t, shape):
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(t.shape)}")


def _check_out(out, *inputs):
    reach = 0  # the farthest element that the inner dimension reaches
    for step, size in sorted((s, n) for s, n in zip(out.stride(), out.shape, strict=True) if n > 1):
        if step <= reach:
            raise ValueError(f"elements of out overlap or interleave: shape {tuple(out.shape)}, strides {out.stride()}")
        reach += step * (size - 1)
    if out.numel() and out.untyped_storage().data_ptr() in {t.untyped_storage().data_ptr() for t in inputs if t is not None}:
        raise ValueError("out shares its storage with an input")


def _check_all(a, b, out, bias, residual, activation, precision):
    if v1_kernel is None:
        raise RuntimeError("matmul() needs triton: pip install triton")
    _check("a", a)
    _check("b", b, like=a)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"inner sizes differ: a is {tuple(a.shape)}, b is {tuple(b.shape)}")
    shape = a.shape[0], b.shape[1]
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    if precision is not None and a.dtype != torch.float32:
        raise ValueError(f"precision is a choice for float32 inputs, a is {a.dtype}")
    if bias is not None:
        _check("bias", bias, like=a, ndim=1)
        _check_shape("bias", bias, shape[1:])
        if not bias.is_contiguous():
            raise ValueError(f"bias must be contiguous, got strides {bias.stride()}")
    if residual is not None:
        _check("residual", residual, like=a)
        _check_shape("residual", residual, shape)
    if out is None:
        out = torch.empty(shape, dtype=a.dtype, device=a.device)
    _check("out", out, like=a)
    _check_shape("out", out, shape)
    _check_out(out, a, b, bias, residual)
    return out


# --8<-- [start:why_not_tma]
def why_not_tma(a, b, out):
    """Why v4 cannot take these tensors: a sentence, or "" where it can."""
    if TensorDescriptor is None:
        return "this triton has no tensor descriptors"
    if not INTERPRETED and torch.cuda.get_device_capability(a.device)[0] < 9:
        return "the GPU has no TMA (it came with sm_90)"
    if a.element_size() != 2:
        return f"v4 is for two-byte types, a is {a.dtype}"
    for name, t in (("a", a), ("b", b), ("out", out)):
        if t.numel() == 0:
            return f"{name} is empty"
        if t.data_ptr() % 16:
            return f"{name} does not begin at a multiple of 16 bytes"
        if _transposed(t) and name != "out":
            t = t.t()                          # a descriptor of the transpose
        if t.stride(1) != 1:
            return f"{name} has strides {t.stride()}: v4 needs a 1 there"
        if t.stride(0) * 2 % 16:
            return f"rows of {name} do not begin at multiples of 16 bytes"
        if t.stride(0) < t.shape[1]:
            return f"rows of {name} overlap: strides {t.stride()}"
        if max(t.shape) >= 2**31 or t.stride(0) * 2 >= 2**40:
            return f"{name} is too large for a descriptor"
    return ""
# --8<-- [end:why_not_tma]


def _transposed(t):
    return t.stride(1) != 1 and t.stride(0) == 1


# --8<-- [start:situation]
def situation(a, b, precision, epilogue):
    """What the choice of tiles depends on, as one integer: the sizes up to a
    power of two, which inputs are transposed, the precision, the epilogue."""
    code = 0
    for size in (a.shape[0], b.shape[1], a.shape[1]):
        code = code * 64 + max(size - 1, 0).bit_length()
    for flag in (_transposed(a), _transposed(b), epilogue):
        code = code * 2 + flag
    return code * 3 + PRECISIONS.index(precision)
# --8<-- [end:situation]


@cache
def _sms(index):
    if INTERPRETED:
        return 3  # few enough that a program has several tiles
    return torch.cuda.get_device_properties(index).multi_processor_count


class Plan:
    """One product, checked and ready: call it to run it, as often as you like.

    kernel: "v1" … "v4"; reason: why not v4, or ""; out: the tensor that is
    written; config: a tuple as in the lists at the top, None before v3 and v4
    have been tuned by the first call.
    """

    def __init__(self, out, kernel, reason, config):
        self.out, self.kernel, self.reason, self.config = out, kernel, reason, config
        self.launch = None

    def bind(self, kernel, args, constants):
        if self.out.numel() == 0:
            self.launch = lambda: None                 # no tile, and no grid without tiles
        elif self.config is None:
            self.launch = partial(_tune, kernel, args, constants, self)
        else:
            self.launch = _ready(getattr(kernel, "fn", kernel) if self.kernel in ("v3", "v4") else kernel, args, constants, self)
        return self

    def __call__(self):
        with torch.cuda.device_of(self.out):           # launch where the data is
            self.launch()
        return self.out


def _tiles(plan, meta):
    return triton.cdiv(plan.out.shape[0], meta["BLOCK_M"]) * triton.cdiv(plan.out.shape[1], meta["BLOCK_N"])


# --8<-- [start:launch]
def _ready(kernel, args, constants, plan):
    """The launch of one configuration, with everything bound."""
    config = _config(plan.config)
    names = constants | config.kwargs
    if plan.kernel == "v1":
        del names["GROUP_M"]
    tiles = _tiles(plan, names)
    sms = _sms(plan.out.device.index) if names.get("PERSISTENT") else tiles
    return partial(kernel[min(tiles, sms),], *args, **names,
                   num_warps=config.num_warps, num_stages=config.num_stages)


def _tune(kernel, args, constants, plan):
    """The first launch: the autotuner's. Later ones go to the kernel."""
    def grid(meta):
        tiles = _tiles(plan, meta)
        sms = _sms(plan.out.device.index) if meta.get("PERSISTENT") else tiles
        return (min(tiles, sms),)

    kernel[grid](*args, **constants)
    plan.config = _blocks(kernel.best_config)
    plan.launch = _ready(kernel.fn, args, constants, plan)
# --8<-- [end:launch]


def plan(a, b, out=None, *, bias=None, activation=None, residual=None, precision=None, kernel="auto", config=None):
    """What matmul() will run, as a Plan. Arguments as there."""
    out = _check_all(a, b, out, bias, residual, activation, precision)
    (M, K), N = a.shape, b.shape[1]
    epilogue = bias is not None or residual is not None or activation is not None
    if kernel not in ("auto", "v1", "v2", "v3", "v4"):
        raise ValueError(f'kernel must be "auto" or "v1" to "v4", got {kernel!r}')
    reason = why_not_tma(a, b, out) if kernel in ("auto", "v4") else ""
    if INTERPRETED and kernel == "auto":
        reason = reason or "the interpreter has no TMA: ask for v4 by name"
    if kernel == "v4" and reason:
        raise ValueError(f"v4 cannot run: {reason}")
    if kernel in ("v1", "v2") and epilogue:
        raise ValueError(f"{kernel} has no epilogue: leave out bias, activation and residual, or take v3")
    if kernel == "auto":
        kernel = "v3" if reason else "v4"
    wide = a.element_size() == 4
    if config is None and (INTERPRETED or kernel in ("v1", "v2")):  # nothing to tune with, or nothing to tune
        config = V4_CONFIGS[0] if kernel == "v4" else FP32_CONFIGS[0] if wide else FIXED
    if config is not None:
        config = _check_config(config, 8 if kernel == "v4" else 6)
    code = situation(a, b, precision or "ieee", epilogue)
    extra = residual.stride() if residual is not None else (0, 0)
    if kernel == "v4":
        a_t, b_t = _transposed(a), _transposed(b)
        described = [_descriptor(t) for t in (a.t() if a_t else a, b.t() if b_t else b, out)]
        constants = {"A_T": a_t, "B_T": b_t, "ACTIVATION": activation}
        args = (*described, bias, residual, M, N, K, *extra, code)
        if config is not None:
            names = ("a", "b", "c")
            set_block_shapes(dict(zip(names, described, strict=True)) | constants | _config(config).kwargs)
        return Plan(out, kernel, reason, config).bind(v4_kernel, args, constants)
    strides = (*a.stride(), *b.stride(), *out.stride())
    constants = {"PRECISION": precision or "ieee"}
    if kernel == "v3":
        args = (a, b, out, bias, residual, M, N, K, *strides, *extra, code)
        return Plan(out, kernel, reason, config).bind(v3_kernel, args, constants | {"ACTIVATION": activation})
    args = (a, b, out, M, N, K, *strides)
    return Plan(out, kernel, reason, config).bind(v1_kernel if kernel == "v1" else v2_kernel, args, constants)


def _descriptor(t):
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1])  # set_block_shapes() sets the block


def _check_config(config, length):
    if len(config) != length:
        raise ValueError(f"config must have {length} entries, as in the lists at the top of gemm.py, got {config}")
    for name, value in zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), config, strict=False):
        if isinstance(value, bool) or not isinstance(value, int) or value < 16 or value & (value - 1):
            raise ValueError(f"{name} must be a power of two, 16 or more, got {value!r}")
    if config[3] < 1:
        raise ValueError(f"GROUP_M must be at least 1, got {config[3]}")
    if length == 8 and config[7] not in (1, 2):
        raise ValueError(f"PIECES must be 1 or 2, got {config[7]}")
    return tuple(config)


# --8<-- [start:matmul]
def matmul(a, b, out=None, *, bias=None, activation=None, residual=None,
           precision=None, kernel="auto", config=None):
    """out = activation(a @ b + bias) + residual, summed in fp32, rounded once.

    a: [M, K], b: [K, N], out and residual: [M, N], any sizes, any strides;
    bias: [N], contiguous; one dtype of float32, float16, bfloat16, one device.
    activation: None, "relu" or "gelu" (the exact one, with erf).
    precision: for float32 alone, "ieee" (the default), "tf32" or "tf32x3".
    kernel: "v1" … "v4", or "auto": v4 where TMA is allowed, else v3; plan()
    tells which, and why. config: a tuple as in the lists at the top of the
    file instead of tuning. No gradient is recorded. Call it once before
    capturing it in a CUDA graph. Raises TypeError, ValueError; RuntimeError
    where triton is not installed.
    """
    return plan(a, b, out, bias=bias, activation=activation, residual=residual,
                precision=precision, kernel=kernel, config=config)()
# --8<-- [end:matmul]


# --8<-- [start:splitk]
@triton.jit
def splitk_kernel(a, b, c, M, N, K, a_row, a_col, b_row, b_col,
                  SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    tile, across = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    row = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tile % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.cdiv(K, SPLITS)                 # this program's part of K
    start = tl.program_id(1).to(tl.int64) * chunk
    acc = multiply(a + start * a_col, b + start * b_row, row, col, M, N,
                   min(chunk, K - start), a_row, a_col, b_row, b_col, "ieee",
                   BLOCK_M, BLOCK_N, BLOCK_K)
    at = c + row[:, None] * N + col[None, :]   # contiguous, fp32
    tl.atomic_add(at, acc, mask=(row < M)[:, None] & (col < N)[None, :])
# --8<-- [end:splitk]


# --8<-- [start:tuners]
@cache
def splitk_tuner(reset_to_zero=(), restore_value=()):
    """splitk_kernel, tuned over two splits, with what is declared of c."""
    configs = [triton.Config({"SPLITS": s, "BLOCK_M": 64, "BLOCK_N": 64,
                              "BLOCK_K": 64}, num_warps=4) for s in (4, 16)]
    return triton.autotune(configs, key=["M", "N", "K"],
                           reset_to_zero=list(reset_to_zero),
                           restore_value=list(restore_value))(splitk_kernel)


def splitk_matmul(a, b):
    """a @ b in fp32, from two-byte inputs: a fresh c, zeroed by us."""
    c = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    _splitk(splitk_tuner(reset_to_zero=("c",)), a, b, c)
    return c


def splitk_add(c, a, b):
    """c += a @ b: trials must leave c as they found it."""
    _splitk(splitk_tuner(restore_value=("c",)), a, b, c)
    return c
# --8<-- [end:tuners]


def _splitk(tuner, a, b, c):
    if v1_kernel is None:
        raise RuntimeError("this needs triton: pip install triton")
    _check("a", a)
    _check("b", b, like=a)
    if a.element_size() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a and b must be two-byte matrices that fit, got {tuple(a.shape)} and {tuple(b.shape)} of {a.dtype}")
    _check_shape("c", c, (a.shape[0], b.shape[1]))
    if c.dtype != torch.float32 or c.device != a.device or not c.is_contiguous():
        raise ValueError(f"c must be contiguous float32 on {a.device}, got {c.dtype} on {c.device}, strides {c.stride()}")
    if c.numel() == 0:
        return

    def grid(meta):
        return triton.cdiv(c.shape[0], meta["BLOCK_M"]) * triton.cdiv(c.shape[1], meta["BLOCK_N"]), meta["SPLITS"]

    args = (a, b, c, a.shape[0], b.shape[1], a.shape[1], *a.stride(), *b.stride())
    with torch.cuda.device_of(a):
        if INTERPRETED:  # nothing to tune with
            tuner.fn[grid](*args, **tuner.configs[0].kwargs)
        else:
            tuner[grid](*args)


# --8<-- [start:first_call]
def first_call(reset_to_zero, seed=0):
    """How many times the right answer the first, tuning call returns."""
    gen = torch.Generator("cuda").manual_seed(seed)
    a, b = torch.randn(2, 256, 256, device="cuda", generator=gen).bfloat16()
    c = torch.zeros(256, 256, device="cuda")
    splitk_tuner.cache_clear()                 # as in a fresh process
    _splitk(splitk_tuner(reset_to_zero=reset_to_zero), a, b, c)
    splitk_tuner.cache_clear()
    right = a.double() @ b.double()
    return ((c.double() * right).sum() / (right * right).sum()).item()
# --8<-- [end:first_call]


# --8<-- [start:order]
def tile_order(down, across, group):
    """(row, column) of the tile of each program, in program order."""
    order = []
    for tile in range(down * across):
        size = group * across
        first = tile // size * group
        height = min(down - first, group)
        order.append((first + tile % size % height, tile % size // height))
    return order


def bands(down, across, group, programs):
    """Rows of A tiles and columns of B tiles that the first programs read."""
    wave = tile_order(down, across, group)[:programs]
    return len({i for i, _ in wave}), len({j for _, j in wave})
# --8<-- [end:order]


# --8<-- [start:pointwise]
@triton.jit
def pointwise_kernel(x, bias, residual, out, n, columns, BLOCK: tl.constexpr):
    """gelu(x + bias) + residual over contiguous matrices, in one pass."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n).to(tl.float32)
    v += tl.load(bias + i % columns, mask=i < n).to(tl.float32)
    v = 0.5 * v * (1 + tl.erf(v * 0.7071067811865476))
    v += tl.load(residual + i, mask=i < n).to(tl.float32)
    tl.store(out + i, v, mask=i < n)
# --8<-- [end:pointwise]


# --8<-- [start:unfused]
def eager(x, w, bias, residual):
    """Four kernels: product, sum, GELU, sum."""
    return torch.nn.functional.gelu(torch.mm(x, w) + bias) + residual


def library_then_one_kernel(x, w, bias, residual):
    """Two kernels: the library's product, then everything else in one pass."""
    y = torch.mm(x, w)
    out, n = torch.empty_like(y), y.numel()
    pointwise_kernel[(triton.cdiv(n, 2048),)](y, bias, residual, out, n,
                                              y.shape[1], BLOCK=2048)
    return out
# --8<-- [end:unfused]


def fused(x, w, bias, residual):
    return matmul(x, w, bias=bias, activation="gelu", residual=residual)


def fused_without_residual(x, w, bias, residual):
    return matmul(x, w, bias=bias, activation="gelu")


def traffic(m, n, k, passes):
    """Bytes moved with two-byte elements: the product, then `passes` over its result.

    passes: for each kernel after the product, the matrices of m x n that it reads and writes. A kernel that is fused
    reads the residual and writes the result: that is the (1, 1) that the first line counts.
    """
    return 2 * (m * k + k * n + m * n) + sum(2 * m * n * p for p in passes)


# unit roundoff of the result's type: the largest error of the one rounding
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def error_bound(dtype, k, precision=None):
    """Largest relative error accepted: one rounding of the result, and k additions in fp32.

    Roundings of the additions do not conspire, so that they grow as the square root of k. The tensor core cuts where IEEE
    rounds, which the factor of eight covers. TF32 inputs keep 10 bits, cut or rounded: 2**-10 at most on either side.
    """
    inputs = 2.0**-9 if precision == "tf32" else 0.0
    return ROUNDOFF[dtype] + 8 * 2.0**-24 * (2 + k**0.5) + inputs


def relative_error(out, ref):
    """||out - ref|| / ||ref|| in fp64; NaN where out holds one."""
    ref = ref.double()
    return ((out.double() - ref).norm() / ref.norm()).item()


CHOSEN = {}  # what tuning chose: {(kernel, m, n, k, dtype): config}


def _layout(t, which):
    """The same values, stored transposed where the letter says T."""
    return t.t().contiguous().t() if which == "T" else t


def _make(m, n, k, dtype, product, layout, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    a = _layout(torch.randn(m, k, device="cuda", generator=gen, dtype=dtype), layout[0])
    b = _layout(torch.randn(k, n, device="cuda", generator=gen, dtype=dtype), layout[1])
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    run = product(a, b, out)
    run()
    if isinstance(run, Plan):
        CHOSEN[run.kernel, m, n, k, dtype] = run.config, run.reason

    def error():
        out.fill_(float("nan"))
        run()
        return relative_error(out, a.double() @ b.double())

    return run, error


def _library(a, b, out):
    return partial(torch.mm, a, b, out=out)


def _facts(kernel, m, n, k, dtype):
    config, reason = CHOSEN[kernel, m, n, k, dtype]
    found = {"kernel": kernel, "config": " ".join(map(str, config))}
    return found | ({"why not v4": reason} if reason else {})


def _make_epilogue(m, n, k, function, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    x, w, bias, residual = (torch.randn(*s, device="cuda", generator=gen).bfloat16() for s in ((m, k), (k, n), (n,), (m, n)))
    w.mul_(k**-0.5)
    added = 0.0 if function is fused_without_residual else residual.double()
    if function in (fused, fused_without_residual):
        run = plan(x, w, bias=bias, activation="gelu", residual=residual if function is fused else None)
        run()
        CHOSEN[function.__name__, m, n, k, torch.bfloat16] = run.config, run.reason
    else:
        run = partial(function, x, w, bias, residual)

    def error():
        if isinstance(run, Plan):
            run.out.fill_(float("nan"))
        else:
            torch.empty_like(residual).fill_(float("nan"))  # stays in the allocator, where the next output will land
        ref = x.double() @ w.double()
        ref = torch.nn.functional.gelu(ref.add_(bias.double())).add_(added)
        return relative_error(run(), ref)

    return run, error


def _make_saving(m, n, passes, seed):
    """A copy that moves as many bytes as `passes` matrices of m x n."""
    x = torch.randn(m * passes // 2, n, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()
    out = torch.empty_like(x)

    def error():
        out.fill_(float("nan"))
        out.copy_(x)
        return relative_error(out, x)

    return partial(out.copy_, x), error


def peak_bytes(function, m, n, k):
    """Bytes allocated at the peak of one call, beyond its inputs."""
    x, w, bias, residual = (torch.zeros(*s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n), (n,), (m, n)))
    function(x, w, bias, residual)  # compile, and let libraries allocate their workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = function(x, w, bias, residual)
    torch.cuda.synchronize()
    del out
    return torch.cuda.max_memory_allocated() - before


def launches(function, m=2048, n=2048, k=1024):
    """Kernels that one call launches, counted by the profiler, and -1 where that sees none."""
    from torch.profiler import ProfilerActivity, profile

    x, w, bias, residual = (torch.ones(*s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n), (n,), (m, n)))
    function(x, w, bias, residual)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        function(x, w, bias, residual)
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and "mem" not in e.name.lower()[:6]]
    return len(kernels) or -1


def _epilogue_counts(function, m, n, k, kernels, passes):
    return {"launches": kernels, "bytes_moved": traffic(m, n, k, passes), "peak_bytes": peak_bytes(function, m, n, k)}


SIZES = (1024, 2048, 4096, 8192)
ODD = (4095, 4097, 4099)
EPILOGUE = (8192, 4096, 1024)


def _row(case, by, dtype, m, n, k, product, layout="NN", kernel=None):
    name = "fp16" if dtype == torch.float16 else "bf16"
    row = {
        "case": case,
        "by": by,
        "dtype": name,
        "shape": {"m": m, "n": n, "k": k},
        "flop": 2 * m * n * k,
        "bytes": 2 * (m * k + k * n + m * n),
        "make": partial(_make, m, n, k, dtype, product, layout),
        "bound": error_bound(dtype, k),
    }
    if kernel:
        row["facts"] = partial(_facts, kernel, m, n, k, dtype)
    return row


def _library_rows(dtype, m, n, k):
    for layout in ("NN", "NT", "TN"):
        yield _row(f"torch.mm {layout}", "cublas", dtype, m, n, k, _library, layout)


def cases():
    """Four kernels and cuBLAS in three layouts on four sizes; fp16; odd sizes; the epilogue; tuning that adds up."""
    for n in SIZES:
        for kernel in ("v1", "v2", "v3", "v4"):
            tuned = kernel if kernel in ("v3", "v4") else None
            yield _row(kernel, "book", torch.bfloat16, n, n, n, partial(plan, kernel=kernel), kernel=tuned)
        if n == max(SIZES):
            for group in (1, 4, 32):
                config = (*FIXED[:3], group, *FIXED[4:])
                yield _row(f"v2, GROUP_M = {group}", "book", torch.bfloat16, n, n, n, partial(plan, kernel="v2", config=config))
        yield from _library_rows(torch.bfloat16, n, n, n)
    yield _row("v4", "book", torch.float16, 4096, 4096, 4096, partial(plan, kernel="v4"), kernel="v4")
    yield from _library_rows(torch.float16, 4096, 4096, 4096)
    yield _row("auto", "book", torch.bfloat16, *ODD, plan, kernel="v3")
    yield from _library_rows(torch.bfloat16, *ODD)

    m, n, k = EPILOGUE
    group = {"dtype": "bf16", "shape": {"m": m, "n": n, "k": k}, "bound": error_bound(torch.bfloat16, k) + 3 * 2.0**-8}
    flop, compulsory = 2 * m * n * k, traffic(m, n, k, (1,))
    for case, by, function, kernels, passes in (
        ("one kernel", "book", fused, 1, (1,)),                # reads the residual
        ("one kernel, no residual", "book", fused_without_residual, 1, ()),
        ("product, then one kernel", "book", library_then_one_kernel, 2, (3,)),
        ("product, sum, GELU, sum", "torch", eager, 4, (2, 2, 3)),
    ):
        chosen = {"facts": partial(_facts, function.__name__, m, n, k, torch.bfloat16)} if by == "book" and kernels == 1 else {}
        yield {"case": case, "by": by, "flop": flop, "bytes": compulsory if passes else traffic(m, n, k, ()),
               "make": partial(_make_epilogue, m, n, k, function),
               "counts": partial(_epilogue_counts, function, m, n, k, kernels, passes), **group, **chosen}
    yield {"case": "product alone", "by": "cublas", "flop": flop, "bytes": traffic(m, n, k, ()),
           "make": partial(_make, m, n, k, torch.bfloat16, _library, "NN"), **group}
    yield {"case": "copy of the bytes saved", "by": "torch", "flop": 0, "bytes": 2 * m * n * 6,
           "make": partial(_make_saving, m, n, 6), **group}

    for case, declared in (("split-K, reset_to_zero", ("c",)), ("split-K, nothing declared", ())):
        yield {
            "case": case,
            "by": "book",
            "dtype": "bf16",
            "shape": {"m": 256, "n": 256, "k": 256},
            "flop": 2 * 256**3,
            "bytes": 2 * 2 * 256**2 + 4 * 256**2,
            "make": lambda seed, declared=declared: (partial(first_call, declared, seed), lambda: abs(first_call(declared, seed) - 1)),
            "bound": 1e-3 if declared else None,
            "timers": ("none",),
            "facts": lambda declared=declared: {"times": round(first_call(declared), 3)} | ({} if declared else {"broken": True}),
        }


# --8<-- [start:figure]
def draw_orders(side=8, group=4, programs=16):
    """An SVG: which tiles the first programs make, row by row and in groups, and which bands of A and B they read."""
    u, gap = 26, 34
    panel = gap + u + 10 + side * u
    width, height = 2 * (panel + gap), 40 + u + 10 + side * u + 46
    out = []

    def box(x, y, style):
        return f'<rect x="{x}" y="{y}" width="{u}" height="{u}" {style}/>'

    def text(x, y, words, extra='text-anchor="middle"'):
        return f'<text x="{x}" y="{y}" {extra}>{words}</text>'

    said = []
    for at, (name, high) in enumerate((("row after row", 1), (f"groups of {group} rows", group))):
        x0, y0 = gap + at * (panel + gap) + u + 10, 40 + u + 10
        order = tile_order(side, side, high)
        wave = {place: number for number, place in enumerate(order[:programs])}
        rows, columns = bands(side, side, high, programs)
        said.append(f"{name}: {rows} bands of A and {columns} of B")
        out.append(text(x0 - u - 10, 22, name, 'text-anchor="start" font-weight="600"'))
        out += [text(x0 - u / 2 - 10, y0 - 16, "A"), text(x0 - u - 10, y0 + side * u + 24,
                f"reads {rows} bands of A, {columns} of B: {rows + columns}", 'text-anchor="start"')]
        for i in range(side):
            used = any(i == row for row, _ in wave)
            out.append(box(x0 - u - 10, y0 + i * u, 'class="band a"' if used else 'class="cell"'))
            used = any(i == col for _, col in wave)
            out.append(box(x0 + i * u, y0 - u - 10, 'class="band b"' if used else 'class="cell"'))
            for j in range(side):
                mine = (i, j) in wave
                out.append(box(x0 + j * u, y0 + i * u, 'class="mine"' if mine else 'class="cell"'))
                if mine:
                    out.append(text(x0 + (j + 0.5) * u, y0 + (i + 0.5) * u + 4, wave[i, j]))
        out.append(text(x0 + side * u + 12, y0 - 16, "B"))
    style = (
        ".orders text{font:12px system-ui,sans-serif;fill:var(--book-ink,currentColor)}\n"
        ".orders .cell{fill:none;stroke:var(--book-ink,currentColor);stroke-opacity:.28}\n"
        ".orders .mine{fill:var(--book-accent,currentColor);fill-opacity:.2;stroke:var(--book-accent,currentColor);stroke-width:1.6}\n"
        ".orders .band{stroke:var(--book-ink,currentColor);fill-opacity:.75}\n"
        ".orders .a{fill:var(--book-tile-1)}\n.orders .b{fill:var(--book-tile-2)}\n"
    )
    label = f"{side} by {side} tiles of C, the first {programs} programs marked. " + "; ".join(said)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="orders" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{label}">\n<style>\n{style}</style>\n' + "\n".join(out) + "\n</svg>\n")
# --8<-- [end:figure]


def sweep():
    """Print TFLOP/s of every configuration of v3 and v4 on the four sizes, and of cuBLAS; the best is marked."""
    from triton.testing import do_bench

    inputs = {}
    for n in SIZES:
        gen = torch.Generator("cuda").manual_seed(n)
        a, b = (torch.randn(n, n, device="cuda", generator=gen, dtype=torch.bfloat16) for _ in range(2))
        inputs[n] = a, b, torch.empty_like(a)

    def line(name, rates):
        print(f"{name:48}" + "".join(f"{r:>9.1f}" if isinstance(r, float) else f"{r:>9}" for r in rates), flush=True)

    def rate(run, n):
        return 2 * n**3 / do_bench(run, warmup=10, rep=40, return_mode="median") / 1e9

    line("TFLOP/s, bf16", SIZES)
    for layout in ("NN", "NT", "TN"):
        found = []
        for n, (a, b, out) in inputs.items():
            found.append(rate(partial(torch.mm, _layout(a, layout[0]), _layout(b, layout[1]), out=out), n))
        line(f"torch.mm {layout}", found)
    best = {}
    for kernel, configs in (("v3", V3_CONFIGS), ("v4", V4_CONFIGS)):
        for config in configs:
            found = []
            for n, (a, b, out) in inputs.items():
                try:
                    run = plan(a, b, out, kernel=kernel, config=config)
                    run()
                    torch.cuda.synchronize()
                except Exception as failure:  # this configuration is not for this GPU or this triton: say so and go on
                    found.append(type(failure).__name__[:8])
                    continue
                if n == min(SIZES):
                    wrong = relative_error(out, a.double() @ b.double())
                    if not wrong <= error_bound(torch.bfloat16, n):
                        raise SystemExit(f"{kernel} {config}: relative error {wrong:.1e}")
                found.append(rate(run, n))
                best[kernel, n] = max(best.get((kernel, n), (0.0, None)), (found[-1], config))
            line(f"{kernel} {config}", found)
    for (kernel, n), (found, config) in sorted(best.items()):
        print(f"best of {kernel} at {n}: {config} {found:.1f}")


def main():
    parser = argparse.ArgumentParser(description="Check and time matrix products in Triton.")
    parser.add_argument("--sweep", action="store_true", help="TFLOP/s of every configuration, four sizes")
    parser.add_argument("--figure", type=Path, help="write the picture of the two orders, no GPU needed")
    args = parser.parse_args()
    if args.figure:
        args.figure.write_text(draw_orders(), encoding="utf-8")
        return
    if args.sweep:
        sweep()
        return
    from triton.testing import do_bench

    print(f"{'case':28}{'shape':18}{'type':6}{'rel. error':>11}{'ms':>9}{'TFLOP/s':>9}  configuration")
    for case in cases():
        run, error = case["make"](0)
        wrong, shape = error(), "x".join(map(str, case["shape"].values()))
        if case["bound"] is not None and not wrong <= case["bound"]:
            raise SystemExit(f"{case['case']} {shape}: relative error {wrong:.1e} above {case['bound']:.1e}")
        line = f"{case['case']:28}{shape:18}{case['dtype']:6}{wrong:>11.1e}"
        facts = case.get("facts", dict)()
        if case.get("timers") != ("none",):
            ms = do_bench(run, warmup=10, rep=40, return_mode="median")
            line += f"{ms:>9.4f}{case['flop'] / ms / 1e9:>9.1f}  {facts.get('config', '')}"
        else:
            line += f"  first call: {facts['times']} x the right answer"
        print(line)


if __name__ == "__main__":
    main()
