"""The solutions of the chapter on launches."""
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from exercises.batch import launches
from snippets.batch.loops import timeline

ROUTES = ((1, [0, 0, 0]), (3, [2, 0, 2, 2, 0]), (4, [3, 1, 1, 3, 1, 0]), (5, list(range(5)) * 7))


def test_idle_is_counted_from_the_first_kernel_to_the_last():
    assert launches.idle(20, [6, 6, 6]) == 2 * 14
    assert launches.idle(20, [50, 50]) == 0
    assert launches.idle(20, [50, 2, 2]) == 0 and launches.idle(20, [2, 2, 50]) == 2 * 18
    assert launches.idle(20, []) == 0


def test_longest_first_is_the_best_of_all_orders():
    for launch, kernels in ((20, [50, 2, 2, 2]), (10, [5, 30, 5, 11, 1]), (7, [7, 6, 8, 40, 1]), (3, [9, 9])):
        end = lambda order, launch=launch: timeline(launch, order)[-1][2]
        best = launches.best_order(launch, kernels)
        assert sorted(best) == sorted(kernels)
        assert end(best) == min(end(order) for order in permutations(kernels))
    assert timeline(20, launches.best_order(20, [2, 2, 2, 50]))[-1][2] < timeline(20, [2, 2, 2, 50])[-1][2]


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, kinds, args=(), kwargs=None):
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def check_route(device):
    for groups, expert in ROUTES:
        generator = torch.Generator().manual_seed(groups)
        x = torch.randint(-2, 3, (len(expert), 16), generator=generator).bfloat16().to(device)
        w = torch.randint(-2, 3, (groups, 16, 8), generator=generator).bfloat16().to(device)
        with Ops() as ops:
            found = launches.route(x, torch.tensor(expert, device=device), w)
        wanted = torch.stack([row @ w[e].double().cpu() for row, e in zip(x.double().cpu(), expert, strict=True)])
        assert torch.equal(found.double().cpu(), wanted), expert
        assert not any("_local_scalar" in op or "_to_copy" in op and "cpu" in op for op in ops.seen), "the host asked for a value"
    with pytest.raises(ValueError, match="expert must be"):
        launches.route(x, torch.tensor(expert[:-1], device=device), w)
    with pytest.raises(ValueError, match="expert must be"):
        launches.route(x, torch.tensor(expert, device=device, dtype=torch.int32), w)


def check_lost(device):
    x, w = torch.ones(5, 16, device=device).bfloat16(), torch.ones(3, 16, 8, device=device).bfloat16()
    found = launches.route(x, torch.tensor([0, 3, 2, -1, 1], device=device), w)
    assert found.isnan().all(1).tolist() == [False, True, False, True, False] and (found[[0, 2, 4]] == 16).all()


def test_a_number_that_no_group_has_is_seen():
    check_lost("cpu")
    assert launches.idle(20, (k for k in [6, 6, 6])) == 2 * 14


def test_route():
    assert hasattr(F, "grouped_mm")
    check_route("cpu")


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_route_on_gpu():
    check_route("cuda")
    check_lost("cuda")
    x, w = torch.zeros(64, 16, device="cuda", dtype=torch.bfloat16), torch.zeros(4, 16, 8, device="cuda", dtype=torch.bfloat16)
    expert = torch.arange(64, device="cuda") % 4
    launches.route(x, expert, w)
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")                            # raises where the host would wait for the device
        if torch.cuda.get_device_capability()[0] >= 9:
            launches.route(x, expert, w)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
