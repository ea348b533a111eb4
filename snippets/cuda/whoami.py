"""Where does a thread run? Block, warp, lane and multiprocessor, asked from the card itself; and how many blocks fit at once.

Shows: the numbering of threads, %laneid and %smid, a warp told by a shuffle, occupancy by formula, by driver and by counting.
Needs: pip install torch numpy "cuda-core[cu13]" nvidia-cuda-nvrtc
Run:   python whoami.py
Source: CUDA C++ Programming Guide, thread hierarchy and hardware multithreading,
        https://docs.nvidia.com/cuda/cuda-c-programming-guide/;
        PTX ISA, special registers, https://docs.nvidia.com/cuda/parallel-thread-execution/
SPDX-License-Identifier: MIT
"""
import re
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

NEEDS = "gpu, cuda-core"
LANES = 32
COLUMNS = ("block", "warp", "lane", "sm")
VALUES = (1, 64, 160)  # floats that each thread of reside_… holds


# --8<-- [start:locate]
def locate(grid, block, block_index, thread_index):
    """Where one thread is, by the rule: x runs fastest, then y, then z.

    grid, block: sizes (x, y, z); block_index, thread_index: places in them.
    Returns the number of its "block" in the grid, of the "thread" in the block,
    of its "warp" in the block and of its "lane" in the warp.
    """
    _check_sizes(grid, block)
    _check_inside("block_index", block_index, grid)
    _check_inside("thread_index", thread_index, block)

    def number(at, size):
        return (at[2] * size[1] + at[1]) * size[0] + at[0]

    thread = number(thread_index, block)
    return {"block": number(block_index, grid), "thread": thread,
            "warp": thread // LANES, "lane": thread % LANES}
# --8<-- [end:locate]


def _check_inside(name, at, size):
    if len(at) != 3 or not all(0 <= i < n for i, n in zip(at, size, strict=True)):
        raise ValueError(f"{name} {tuple(at)} is not inside {tuple(size)}")


def expected(grid, block):
    """The map of a whole launch by the same rule: int32 [blocks, threads, 3]."""
    _check_sizes(grid, block)
    blocks, threads = int(np.prod(grid)), int(np.prod(block))
    thread = np.arange(threads)
    rows = np.stack(np.broadcast_arrays(np.arange(blocks)[:, None], thread // LANES, thread % LANES), axis=-1)
    return rows.astype(np.int32)


def _check_sizes(grid, block):
    limits = {"grid": (2**31 - 1, 65_535, 65_535), "block": (1024, 1024, 64)}
    for name, size in (("grid", grid), ("block", block)):
        if len(size) != 3:
            raise ValueError(f"{name} must have three sizes (x, y, z), got {tuple(size)}")
        for n, most in zip(size, limits[name], strict=True):
            if isinstance(n, bool) or not isinstance(n, int):
                raise TypeError(f"{name} must hold ints, got {n!r}")
            if not 1 <= n <= most:
                raise ValueError(f"{name} {tuple(size)} has a size outside 1 to {most}")
    if int(np.prod(block)) > 1024:
        raise ValueError(f"a block has at most 1024 threads, {tuple(block)} has {int(np.prod(block))}")
    if np.prod([float(n) for n in (*grid, *block)]) > 2**27:
        raise ValueError(f"grid {tuple(grid)} of block {tuple(block)} has more than 2**27 threads: no map of them all")


def compile_kernels(arch, text=None):
    """Compile whoami.cu with NVRTC; no GPU is needed. arch: "sm_90" and the like."""
    from cuda.core import Program, ProgramOptions

    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f'arch must look like "sm_90", got {arch!r}')
    text = Path(__file__).with_suffix(".cu").read_text() if text is None else text
    options = ProgramOptions(name="whoami.cu", arch=arch, std="c++17")
    return Program(text, "c++", options=options).compile("cubin")


@cache
def _kernel(name, device_index, text=None):
    from cuda.core import Device

    major, minor = torch.cuda.get_device_capability(device_index)
    code = compile_kernels(f"sm_{major}{minor}", text)
    Device(device_index).set_current()  # a new thread has none yet
    return code.get_kernel(name)


def _launch(name, grid, block, *arguments, shared=0, text=None):
    """One launch on torch's current device and stream."""
    from cuda.core import Device, LaunchConfig, Stream, launch

    index = torch.cuda.current_device()
    Device(index).set_current()
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    config = LaunchConfig(grid=grid, block=block, shmem_size=shared)
    launch(stream, config, _kernel(name, index, text), *arguments)


def ask(grid, block, out=None, text=None):
    """Launch grid x block threads and let each say who it is.

    grid, block: sizes (x, y, z). Returns an int32 CUDA tensor [blocks, threads, 4]
    with the columns block, warp, lane, sm. out: such a tensor to fill, or None.
    """
    _check_sizes(grid, block)
    shape = (int(np.prod(grid)), int(np.prod(block)), 4)
    if out is None:
        out = torch.empty(shape, dtype=torch.int32, device="cuda")
    if out.shape != shape or out.dtype != torch.int32 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous int32 {shape}, got {out.dtype} {tuple(out.shape)}")
    if not out.is_cuda or out.data_ptr() % 16:
        raise ValueError("out must be on a CUDA device and start at a multiple of 16 bytes")
    with torch.cuda.device(out.device):
        _launch("whoami", tuple(grid), tuple(block), out.data_ptr(), text=text)
    return out


# --8<-- [start:occupancy]
H200 = {"warps": 64, "blocks": 32, "registers": 65_536, "shared": 233_472,
        "reserved": 1024}  # one multiprocessor; reserved: bytes a block


def occupancy(threads, registers, shared=0, sm=H200):
    """How many blocks fit on a multiprocessor at once, and which limit says so.

    threads of a block, registers of a thread, shared bytes of a block.
    Returns {limit: blocks it allows}, the strictest first.
    """
    if not 1 <= threads <= 1024:
        raise ValueError(f"a block has 1 to 1024 threads, got {threads}")
    if not 1 <= registers <= 255:
        raise ValueError(f"a thread has 1 to 255 registers, got {registers}")
    if shared < 0:
        raise ValueError(f"shared must be 0 or more, got {shared}")
    warps = -(-threads // LANES)
    of_a_warp = -(-registers * LANES // 256) * 256          # handed out by 256
    with_registers = sm["registers"] // 4 // of_a_warp * 4  # 4 partitions
    of_a_block = -(-(shared + sm["reserved"]) // 128) * 128
    allowed = {
        "warps": sm["warps"] // warps,
        "blocks": sm["blocks"],
        "registers": with_registers // warps,
        "shared memory": sm["shared"] // of_a_block,
    }
    return dict(sorted(allowed.items(), key=lambda item: item[1]))
# --8<-- [end:occupancy]


def limits():
    """The limits of one multiprocessor of the current device, as `occupancy` takes them."""
    from cuda.core import Device

    has = Device(torch.cuda.current_device()).properties
    return {
        "warps": has.max_threads_per_multiprocessor // LANES,
        "blocks": has.max_blocks_per_multiprocessor,
        "registers": has.max_registers_per_multiprocessor,
        "shared": has.max_shared_memory_per_multiprocessor,
        "reserved": has.reserved_shared_memory_per_block,
    }


def _check_residents(threads, values, shared):
    if values not in VALUES:
        raise ValueError(f"values must be one of {VALUES}, got {values}")
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise TypeError(f"threads must be an int, got {threads!r}")
    most = 1024 if values <= 32 else 128
    if not 1 <= threads <= most:
        raise ValueError(f"threads must be 1 to {most} with {values} values each, got {threads}")
    if not 0 <= shared <= 48 * 1024:
        raise ValueError(f"shared must be 0 to {48 * 1024} bytes, got {shared}")


def residents(threads, values, shared=0, clocks=100_000):
    """How many blocks a multiprocessor holds at once: formula, driver, and counted.

    threads of a block; values: floats that each thread holds in registers, 1, 64 or
    160; shared: bytes of a block, up to 48 KiB; clocks: how long each block stays.
    """
    _check_residents(threads, values, shared)
    name, index = f"reside_{values}", torch.cuda.current_device()
    kernel, sms = _kernel(name, index), torch.cuda.get_device_properties(index).multi_processor_count
    blocks = 40 * sms  # more than fit at once
    live, peak = torch.zeros(2, 1024, dtype=torch.int32, device="cuda")  # by %smid
    rng = torch.Generator("cuda").manual_seed(0)
    given = torch.rand(values, threads, device="cuda", generator=rng)
    out = torch.full((blocks, threads), float("nan"), device="cuda")
    _launch(name, blocks, threads, live.data_ptr(), peak.data_ptr(),
            given.data_ptr(), out.data_ptr(), np.int64(clocks), shared=shared)
    registers = kernel.attributes.num_regs
    by = occupancy(threads, registers, shared, limits())
    return {
        "registers": registers,
        "formula": next(iter(by.values())),
        "limit": next(iter(by)),
        "driver": kernel.occupancy.max_active_blocks_per_multiprocessor(threads, shared),
        "counted": int(peak.max()),
        "left": int(live.abs().sum()),  # 0: every block that came has gone
        "sum_error": _sum_error(given, out),
    }


def _sum_error(given, out):
    """Largest difference of any block's sums from those of the host, in fp64, relative."""
    want = torch.zeros(given.shape[1], dtype=torch.float64, device=given.device)
    for row in given.double():
        want = want * 0.5 + row
    return ((out.double() - want).abs() / want).max().item()


def _make_map(grid, block, seed):
    out = torch.empty(int(np.prod(grid)), int(np.prod(block)), 4, dtype=torch.int32, device="cuda")
    want = torch.from_numpy(expected(grid, block)).cuda().double()
    run = partial(ask, grid, block, out)

    def error():
        out.fill_(-1)
        run()
        return ((out[..., :3].double() - want).norm() / want.norm()).item()

    return run, error


def _map_facts(grid, block):
    told = ask(grid, block)
    sm = told[:, 0, 3]
    per_sm = torch.bincount(sm.long())
    return {
        "sms_seen": int((per_sm > 0).sum()),
        "most_blocks_on_one_sm": int(per_sm.max()),
        "blocks_split_over_sms": int((told[..., 3] != sm[:, None]).any(1).sum()),
        "warps_a_block": int(told[..., 1].max()) + 1,
        "lanes_in_the_last_warp": int(told[0, :, 1].eq(told[..., 1].max()).sum()),
    }


def _map_series(grid, block):
    sm = ask(grid, block)[:, 0, 3].tolist()
    return {"block": list(range(len(sm))), "sm": sm}


def _make_residents(threads, values, shared, seed):
    run = partial(residents, threads, values, shared)

    def error():
        got = run()
        if got["left"] or not got["sum_error"] < 1e-6:
            return 1.0
        return abs(got["driver"] - got["formula"]) / got["driver"]

    return run, error


@cache
def _residents_facts(threads, values, shared):
    got = residents(threads, values, shared)
    return {key: got[key] for key in ("registers", "formula", "driver", "counted", "limit")} | {
        "warps": got["counted"] * -(-threads // LANES), "shared_kib": shared // 1024}


MAPS = {"one line": ((264, 1, 1), (256, 1, 1)),  # names: grid and block
        "a box": ((5, 3, 2), (8, 4, 3)),
        "not a whole number of warps": ((7, 1, 1), (50, 2, 1))}
RESIDENTS = ((128, 1, 0), (1024, 1, 0), (32, 1, 0), (128, 64, 0), (128, 160, 0),
             (128, 1, 40 * 1024))


def cases():
    for case, (grid, block) in MAPS.items():
        yield {
            "case": case, "by": "book", "dtype": "int32",
            "shape": {"blocks": int(np.prod(grid)), "threads": int(np.prod(block))},
            "make": partial(_make_map, grid, block), "bound": 0.0, "timers": ("none",),
            "facts": partial(_map_facts, grid, block),
            "series": partial(_map_series, grid, block),
        }
    for threads, values, shared in RESIDENTS:
        yield {
            "case": "residents", "by": "book", "dtype": "fp32",
            "shape": {"threads": threads, "values": values, "shared": shared},
            "make": partial(_make_residents, threads, values, shared), "bound": 0.0,
            "timers": ("none",), "facts": partial(_residents_facts, threads, values, shared),
        }


def main():
    if not torch.cuda.is_available():
        raise SystemExit("whoami.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    told = ask((2, 1, 1), (40, 1, 1)).cpu()
    print("thread  " + "  ".join(f"{name:>5}" for name in COLUMNS))
    for block, thread in ((0, 0), (0, 31), (0, 32), (0, 39), (1, 0), (1, 39)):
        print(f"{thread:>6}  " + "  ".join(f"{value:>5}" for value in told[block, thread].tolist()))
    for case in cases():
        _, error = case["make"](0)
        if not error() <= case["bound"]:
            raise SystemExit(f"{case['case']} {case['shape']}: the card and the formula differ")
    print("\nevery map and every occupancy agrees with its formula")


if __name__ == "__main__":
    main()
