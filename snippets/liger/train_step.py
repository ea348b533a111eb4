"""One training step of a small Llama: as it is, patched by Liger, compiled. One process for each, and an audit of the patch.

Shows: who replaced which forward, a check that fails when nothing was replaced, tokens a second and peak memory, and loss curves that must agree.
Needs: pip install torch triton liger-kernel transformers (Linux, an NVIDIA GPU; the audit and the toy model run anywhere)
Run:   python train_step.py
Source: https://github.com/linkedin/Liger-Kernel; the model is built from a configuration with random weights, nothing is downloaded
SPDX-License-Identifier: MIT
"""
import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn

NEEDS = "gpu sm>=80, 24 GiB, liger-kernel, transformers"

LAYERS, HIDDEN, INTER, HEADS, KV_HEADS = 4, 2048, 5632, 16, 4
BATCH, LENGTH = 2, 2048
WARMUP, STEPS = 3, 10
ARMS = (("plain", 128256), ("liger", 128256), ("global", 128256), ("compile", 128256), ("plain", 32000), ("liger", 32000))


# --8<-- [start:audit]
def from_liger(function):
    """Whether a function's code lives in Liger's package."""
    return (function.__module__ or "").startswith("liger_kernel")


def audit(model, is_patched=from_liger):
    """{class name: (modules with a replaced forward, modules)}, all modules."""
    found = {}
    for module in model.modules():
        forward = getattr(module.forward, "__func__", module.forward)
        name = type(module).__name__
        patched, total = found.get(name, (0, 0))
        found[name] = (patched + bool(is_patched(forward)), total + 1)
    return found


def require_patched(model, *kinds, is_patched=from_liger):
    """Raise RuntimeError unless every module of each kind is patched.

    kinds: ends of class names, such as "RMSNorm". A kind that no module has is
    an error as well: a loop over nothing must not pass.
    """
    if not kinds:
        raise ValueError("name at least one kind of module, such as 'RMSNorm'")
    found = audit(model, is_patched)
    for kind in kinds:
        hits = {n: c for n, c in found.items() if n.endswith(kind)}
        if not hits:
            raise RuntimeError(f"{type(model).__name__} has no module of kind "
                               f"'{kind}', only {sorted(found)}")
        for name, (patched, total) in hits.items():
            if patched < total:
                raise RuntimeError(
                    f"{patched} of {total} {name} are patched: was the patch "
                    "applied before the model was built, or to this instance?")
    return found
# --8<-- [end:audit]


# --8<-- [start:toy]
class Norm(nn.Module):
    def forward(self, x):
        return x / x.pow(2).mean(-1, keepdim=True).sqrt()


class FastNorm(Norm):
    """A stand-in for a faster kernel: the same function, other code."""

    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:], eps=0.0)


class Toy(nn.Module):
    """Two layers that look the class `Norm` up when they are built."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Norm(), nn.Linear(8, 8))
                                    for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@contextlib.contextmanager
def swapped(owner, **replacements):
    """owner.name = replacement for the time of a with block; then as before."""
    before = {name: getattr(owner, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(owner, name, replacement)
        yield
    finally:
        for name, original in before.items():
            setattr(owner, name, original)
# --8<-- [end:toy]


# --8<-- [start:build]
def build(vocab, device="cuda", layers=LAYERS, hidden=HIDDEN, inter=INTER,
          heads=HEADS, kv_heads=KV_HEADS):
    """A Llama with seeded random weights in bf16: the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inter,
        num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=LENGTH,
        use_cache=False, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def apply_arm(arm, vocab, **size):
    """(model, callable): what is trained and what is called, both audited."""
    if arm == "global":                       # classes first, then the model
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    model = build(vocab, **size)
    if arm == "liger":                        # this instance
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    if arm in ("liger", "global"):
        require_patched(model, "RMSNorm", "MLP", "ForCausalLM")
    elif any(patched for patched, _ in audit(model).values()):
        raise RuntimeError(f"the arm '{arm}' is to run without Liger, "
                           "and something is patched")
    return model, torch.compile(model) if arm == "compile" else model
# --8<-- [end:build]


# --8<-- [start:step]
def stepper(model, call, ids, lr=1e-4):
    """A function that trains one step and returns its loss, on the device."""
    on_gpu = ids.is_cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=on_gpu)

    def step():
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
# --8<-- [end:step]


def tokens(vocab, device="cuda", batch=BATCH, length=LENGTH):
    generator = torch.Generator(device).manual_seed(1)
    return torch.randint(0, vocab, (batch, length), device=device, generator=generator)


def exact_loss(model, ids):
    """The loss of these weights computed in fp32 from the definition, a few tokens of logits at a time."""
    import copy

    with torch.no_grad():
        plain = copy.deepcopy(model).float().eval()
        hidden = plain.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        wanted, total = ids[:, 1:].flatten(), 0.0
        for h, t in zip(hidden.split(512), wanted.split(512), strict=True):
            logits = (h @ plain.lm_head.weight.t()).double()
            total += (logits.logsumexp(-1) - logits.gather(1, t[:, None])[:, 0]).sum().item()
    return total / wanted.numel()


def module_names():
    """What transformers' Llama module hands to the next model that is built in this process."""
    from transformers.models.llama import modeling_llama

    return ", ".join(getattr(modeling_llama, n).__name__ for n in ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"))


def oddities():
    """What Liger does beside the patch that you asked for; to be asked in a process that ends soon."""
    import importlib.metadata

    import liger_kernel
    import torch.nn.functional as F
    from liger_kernel.transformers import AutoLigerKernelForCausalLM, apply_liger_kernel_to_llama
    from transformers import GPT2Config
    from transformers.models.llama import modeling_llama

    found = {"version": importlib.metadata.version("liger-kernel"), "__version__": hasattr(liger_kernel, "__version__")}
    found["requires"] = ", ".join(r for r in importlib.metadata.requires("liger-kernel") if "extra" not in r)
    try:
        apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=True)
        found["both losses"] = "accepted"
    except AssertionError as error:
        found["both losses"] = f"AssertionError: {error}"
    tiny = AutoLigerKernelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16))
    found["patched in GPT-2"] = sum(patched for patched, _ in audit(tiny).values())
    try:
        require_patched(tiny, "Block")
    except RuntimeError as error:
        found["what the check says"] = str(error)
    cross_entropy = F.cross_entropy
    names = ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb")
    before = {n: getattr(modeling_llama, n) for n in names}
    forward = modeling_llama.LlamaForCausalLM.forward
    try:
        apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=False)
        found["F.cross_entropy after the flag"] = F.cross_entropy.__module__.split(".")[0]
    finally:
        F.cross_entropy = cross_entropy
        modeling_llama.LlamaForCausalLM.forward = forward
        for name, value in before.items():
            setattr(modeling_llama, name, value)
    return found


def child(arm, vocab):
    """One arm in this process: warm up, say READY, wait for a word, measure, print the result."""
    before = module_names()
    model, call = apply_arm(arm, vocab)
    ids = tokens(vocab)
    result = {"arm": arm, "vocab": vocab, "parameters": sum(p.numel() for p in model.parameters()), "module before": before, "module after": module_names()}
    if arm == "plain":
        result["exact"] = exact_loss(model, ids)
    step = stepper(model, call, ids)
    losses = [step() for _ in range(WARMUP)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    print("READY", flush=True)
    if sys.stdin.readline().strip() != "go":
        return
    torch.cuda.reset_peak_memory_stats()
    resident, marks = torch.cuda.memory_allocated(), []
    for _ in range(STEPS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        losses.append(step())
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    result["ms"] = [a.elapsed_time(b) for a, b in marks]
    result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    result["resident_gib"] = resident / 2**30
    result["losses"] = [loss.item() for loss in losses]
    result["audit"] = {name: list(count) for name, count in audit(model).items() if count[0] or name.endswith(("RMSNorm", "MLP", "ForCausalLM"))}
    if arm == "liger":
        with torch.no_grad():
            short = ids[:, :64]
            result["logits in training"] = model(input_ids=short, labels=short).logits is not None
            result["logits in evaluation"] = model.eval()(input_ids=short, labels=short).logits is not None
        if vocab > 100_000:
            result["oddities"] = oddities()
    print("RESULT " + json.dumps(result), flush=True)


def _start(arm, vocab):
    log = tempfile.TemporaryFile("w+")
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--arm", arm, "--vocab", str(vocab)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True), log


def _await(process, log, word):
    for line in process.stdout:
        if line.startswith(word):
            return line[len(word) :]
    process.wait()
    log.seek(0)
    raise RuntimeError(f"{' '.join(process.args[-4:])} ended with {process.returncode} before {word.strip()}:\n" + log.read()[-2000:])


@cache
def results():
    """{(arm, vocab): result}: each arm in a process of its own. They warm up together where memory allows, and are measured one at a time."""
    together = torch.cuda.mem_get_info()[0] > 90 * 2**30
    done, waiting = {}, []
    try:
        for group in [ARMS] if together else [[a] for a in ARMS]:
            waiting = [(arm, *_start(*arm)) for arm in group]
            for _, process, log in waiting:
                _await(process, log, "READY")
            for arm, process, log in waiting:
                process.stdin.write("go\n")
                process.stdin.flush()
                done[arm] = json.loads(_await(process, log, "RESULT "))
                process.wait()
    finally:
        for _, process, log in waiting:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdin.close(), process.stdout.close(), log.close()
    return done


def step_flop(vocab):
    """Matrix products of a step: forward and twice that backward; causal attention counts half."""
    head = HIDDEN // HEADS
    layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * head + 3 * HIDDEN * INTER
    n = BATCH * LENGTH
    return 6 * n * (LAYERS * layer + vocab * HIDDEN) + 6 * LAYERS * n * LENGTH * HIDDEN


def _make(arm, seed):
    def error():
        exact = results()["plain", arm[1]]["exact"]
        return abs(results()[arm]["losses"][0] - exact) / exact

    return partial(_result, arm), error


def _result(arm):
    return results()[arm]


def _counts(arm):
    r = results()[arm]
    ms = sorted(r["ms"])[len(r["ms"]) // 2]
    return {"peak_gib": r["peak_gib"], "resident_gib": r["resident_gib"], "beyond_gib": r["peak_gib"] - r["resident_gib"], "tokens_per_s": round(BATCH * LENGTH / ms * 1e3),
            "patched": sum(patched for patched, _ in r["audit"].values())}


def _apart():
    """Largest relative distance of an arm's loss from the plain one's, over all steps."""
    plain = results()["plain", 128256]["losses"]
    return max(abs(a - b) / b for arm in ("liger", "global", "compile") for a, b in zip(results()[arm, 128256]["losses"], plain, strict=True))


def _curves():
    losses = {arm: results()[arm, 128256]["losses"] for arm in ("plain", "liger", "compile")}
    return {"step": list(range(WARMUP + STEPS)), **losses}


def _audit_counts():
    r = results()["liger", 128256]
    return {f"{name} {what}": n for name, pair in r["audit"].items() for what, n in zip(("patched", "modules"), pair, strict=True)}


def _audit_facts():
    r = results()["liger", 128256]
    return {**r["oddities"], "module before": r["module before"], "module after": r["module after"], "parameters": r["parameters"], "logits in training": r["logits in training"], "logits in evaluation": r["logits in evaluation"]}


# A loss near 12 computed from bf16 activations; each is rounded by 2**-9, and the mean over 4094 tokens averages most of it out.
BOUND = 1e-4
# After thirteen steps of AdamW the rounding of each arm has been fed back into its weights.
CURVES_BOUND = 1e-2


def cases():
    names = {"plain": ("train step", "torch"), "liger": ("train step", "liger"), "global": ("train step, classes patched", "liger"), "compile": ("train step", "compile")}
    for arm in ARMS:
        case, by = names[arm[0]]
        yield {"case": case, "by": by, "dtype": "bf16", "shape": {"tokens": BATCH * LENGTH, "hidden": HIDDEN, "vocab": arm[1], "layers": LAYERS}, "flop": step_flop(arm[1]), "bytes": 0,
               "make": partial(_make, arm), "bound": BOUND, "timers": ("steps",), "samples": partial(lambda a: results()[a]["ms"], arm), "counts": partial(_counts, arm)}
    row = {"dtype": "bf16", "shape": {"tokens": BATCH * LENGTH}, "timers": ("none",), "by": "liger"}
    yield {**row, "case": "loss curves", "make": lambda seed: (_curves, _apart), "bound": CURVES_BOUND, "series": _curves, "facts": lambda: {"apart": _apart()}}
    yield {**row, "case": "audit", "make": partial(_make, ("liger", 128256)), "bound": BOUND, "counts": _audit_counts, "facts": _audit_facts}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=sorted({a for a, _ in ARMS}), help="measure one arm in this process (used by the program itself)")
    parser.add_argument("--vocab", type=int, default=128256)
    given = parser.parse_args()
    if given.arm:
        return child(given.arm, given.vocab)
    print(f"{'vocab':>7} {'arm':9}{'ms/step':>9}{'tokens/s':>10}{'peak GiB':>10}{'beyond weights and states':>27}{'last loss':>11}")
    for (arm, vocab), r in results().items():
        ms = sorted(r["ms"])[len(r["ms"]) // 2]
        print(f"{vocab:7} {arm:9}{ms:9.2f}{BATCH * LENGTH / ms * 1e3:10.0f}{r['peak_gib']:10.2f}{r['peak_gib'] - r['resident_gib']:27.2f}{r['losses'][-1]:11.4f}")
    print(json.dumps(results()["liger", 128256]["audit"]))


if __name__ == "__main__":
    main()
