"""Formats against torch code by code, against what is known of them, and against faults put into the code."""
import json
import math
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.precision import bits

SOURCE = Path(bits.__file__)
FIGURES = SOURCE.parents[2] / "docs" / "precision" / "figures"
WIDGET = SOURCE.parents[2] / "docs" / "assets" / "widgets" / "bits.js"


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "e5m2", "e4m3fn"])
def test_every_code_and_every_tie_is_as_in_torch(name):
    assert bits.compare_with_torch(name) == (0, 0)


def test_known_limits():
    # M021, M022, M064
    assert bits.limits("fp16") == {"largest": 65504.0, "smallest_normal": 2.0**-14, "smallest_subnormal": 2.0**-24, "eps": 2.0**-10}
    assert bits.limits("bf16")["largest"] == pytest.approx(3.3895e38, rel=1e-4)
    assert bits.limits("bf16")["eps"] == 2.0**-7
    assert bits.limits("tf32")["eps"] == bits.limits("fp16")["eps"]
    assert bits.limits("tf32")["smallest_normal"] == bits.limits("fp32")["smallest_normal"] == 2.0**-126
    assert bits.limits("e4m3fn") == {"largest": 448.0, "smallest_normal": 2.0**-6, "smallest_subnormal": 2.0**-9, "eps": 0.125}
    assert bits.limits("e5m2")["largest"] == 57344.0
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32), ("e4m3fn", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        info = torch.finfo(dtype)
        assert (bits.limits(name)["largest"], bits.limits(name)["eps"], bits.limits(name)["smallest_normal"]) == (info.max, info.eps, info.smallest_normal)


@pytest.mark.parametrize("value, name, stored", [
    (65519.0, "fp16", 65504.0), (65520.0, "fp16", math.inf), (-65520.0, "fp16", -math.inf),  # the tie goes to the even code: infinity's
    (2.0**-25, "fp16", 0.0), (1.5 * 2.0**-25, "fp16", 2.0**-24), (2.0**-24, "fp16", 2.0**-24),
    (257.0, "bf16", 256.0), (259.0, "bf16", 260.0), (2049.0, "fp16", 2048.0), (2051.0, "fp16", 2052.0),
    (1 + 2.0**-12, "tf32", 1.0), (1 + 3 * 2.0**-11, "tf32", 1 + 2.0**-9), (464.0, "e4m3fn", 448.0), (61440.0, "e5m2", math.inf),
])
def test_rounding_and_ties(value, name, stored):
    assert bits.rounded(value, name) == stored


def test_overflow_of_e4m3fn_is_a_policy():
    for value in (465.0, 1000.0, math.inf):
        assert math.isnan(bits.rounded(value, "e4m3fn"))
        assert bits.rounded(value, "e4m3fn", "saturate") == 448.0
        assert bits.rounded(-value, "e4m3fn", "saturate") == -448.0
    assert math.isnan(bits.rounded(math.nan, "e4m3fn", "saturate"))
    with pytest.raises(ValueError, match="no infinity"):
        bits.encode(1.0, "e4m3fn", "inf")


def test_the_policy_of_torch_is_one_of_the_two_and_holds_for_all_overflows():
    policy = bits.torch_overflow()
    assert policy in ("nan", "saturate")
    if tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 12):
        assert policy == "nan"
    values = [465.0, 479.0, 480.0, 1e4, 1e30, -465.0, -1e30]
    stored = torch.tensor(values * 9).to(torch.float8_e4m3fn).float().tolist()[: len(values)]
    wanted = [bits.rounded(v, "e4m3fn", policy) for v in values]
    assert [str(s) for s in stored] == [str(w) for w in wanted]


@settings(max_examples=200, deadline=None)
@given(value=st.floats(width=32), name=st.sampled_from(["bf16", "fp16", "e5m2", "fp32"]))
def test_what_is_stored_is_a_nearest_number(value, name):
    stored = bits.rounded(value, name)
    if math.isnan(value):
        assert math.isnan(stored)
    else:
        assert stored == torch.tensor(value, dtype=torch.float32).to(bits._torch_dtype(name)).double().item()
        assert math.copysign(1, stored) == math.copysign(1, value)


def test_decoding_and_encoding_are_inverse():
    for name in ("fp16", "bf16", "e5m2", "e4m3fn"):
        for code in range(0, 1 << bits.format_of(name).bits, 3):
            if not math.isnan(bits.decode(code, name)):
                assert bits.encode(bits.decode(code, name), name) == code


def test_tf32_is_fp32_with_thirteen_bits_off():
    for code in range(0, 1 << 19, 97):
        x = struct.unpack("f", struct.pack("I", code << 13))[0]
        assert bits.decode(code, "tf32") == x or x != x


def test_nf4_levels_are_those_of_bitsandbytes():
    from bitsandbytes.functional import get_4bit_type

    assert np.allclose(bits.nf4_levels(), get_4bit_type("nf4", device="cpu").numpy(), atol=1e-4)
    assert len(bits.nf4_levels()) == 16 and bits.nf4_levels()[7] == 0.0
    assert bits.nf4_levels()[0] == -1.0 and bits.nf4_levels()[-1] == 1.0


def test_levels():
    assert len(bits.levels("e4m3fn")) == 253 and bits.levels("e4m3fn")[-1] == 448.0  # 254 codes; 0 has two
    assert len(bits.levels("e5m2")) == 247
    assert bits.levels("int8") == [float(i) for i in range(-127, 128)]
    with pytest.raises(ValueError, match="16 bits"):
        bits.levels("fp16")


@pytest.mark.parametrize("call, error, text", [
    (lambda: bits.decode(256, "e5m2"), ValueError, "lies in 0 ... 255"),
    (lambda: bits.decode(1.0, "e5m2"), TypeError, "int"),
    (lambda: bits.decode(0, "fp12"), ValueError, "formats are"),
    (lambda: bits.encode(0.0, "fp16", "wrap"), ValueError, "overflow must be"),
])
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()


MUTANTS = [
    ("ties away", "steps = round(math.ldexp(abs(value), f.mantissa - e))", "steps = math.floor(math.ldexp(abs(value), f.mantissa - e) + 0.5)", lambda m: m.rounded(257.0, "bf16") == 256.0),
    ("subnormals one power off", "math.ldexp(m, 1 - f.bias - f.mantissa)", "math.ldexp(m, -f.bias - f.mantissa)", lambda m: m.decode(1, "fp16") == 2.0**-24),
    ("zero forgotten", ", lowest) if value else lowest", ", lowest)", lambda m: m.rounded(0.0, "fp16") == 0.0),
    ("bias off by one", "return 2 ** (self.exponent - 1) - 1", "return 2 ** (self.exponent - 1)", lambda m: m.decode(0x3C00, "fp16") == 1.0),
    ("fn as ieee", "return whole - 1 if self.specials == \"fn\" else", "return", lambda m: m.decode(0x7E, "e4m3fn") == 448.0),
    ("sign of zero lost", "int(math.copysign(1, value) < 0)", "int(value < 0)", lambda m: m.encode(-0.0, "fp16") == 0x8000),
]


@pytest.mark.parametrize("name, old, new, right", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_give_wrong_values(name, old, new, right):
    text = SOURCE.read_text()
    assert text.count(old) == 1 and right(bits)
    mutant = type(bits)("bits_mutant")
    mutant.__dict__["__name__"] = "bits_mutant"
    import sys

    sys.modules["bits_mutant"] = mutant  # dataclass looks its module up
    try:
        exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
        assert not right(mutant)
    finally:
        del sys.modules["bits_mutant"]


def test_the_figures_are_those_that_the_code_draws():
    for name, svg in bits.figures().items():
        assert (FIGURES / name).read_text(encoding="utf-8") == svg, f"draw again: python snippets/precision/bits.py --draw docs/precision/figures ({name})"


@pytest.mark.site
def test_the_widget_decodes_and_encodes_as_python_does():
    codes = []
    for name in bits.FORMATS:
        f = bits.format_of(name)
        every = range(1 << f.bits) if f.bits <= 8 else np.random.default_rng(f.bits).integers(0, 1 << f.bits, 400).tolist()
        codes += [[name, int(c)] for c in every]
    values = [0.0, -0.0, 1.0, 0.1, 65519.0, 65520.0, 448.0, 464.0, 465.0, 2.0**-24, 2.0**-25, 257.0, -3.14159, 1e-40, 1e38, 3.4e38, 7.5e-5]
    program = (
        "const w = require(process.argv[1]); let t = ''; process.stdin.on('data', d => t += d); process.stdin.on('end', () => {"
        "const q = JSON.parse(t); console.log(JSON.stringify([q.codes.map(([n, c]) => String(w.decode(c, n))),"
        "q.values.map(([n, v, o]) => w.encode(v, n, o)), ['int8'].map(n => [w.decode(255, n), w.decode(127, n), w.decode(128, n)])]));});"
    )
    asks = [[n, v, o] for n in bits.FORMATS for v in values for o in (("nan", "saturate") if n == "e4m3fn" else ("inf", "saturate"))]
    text = json.dumps({"codes": codes, "values": asks})
    done = subprocess.run(["node", "-e", program, str(WIDGET)], input=text, capture_output=True, text=True, check=True)
    decoded, encoded, int8 = json.loads(done.stdout)
    for (name, code), got in zip(codes, decoded, strict=True):
        want = bits.decode(code, name)
        assert (math.isnan(want) and got == "NaN") or float(got.replace("Infinity", "inf")) == want, (name, code)
    json_has_no_minus_zero = [(n, -0.0 if v == 0 and math.copysign(1, v) < 0 else v, o) for n, v, o in asks]
    assert encoded == [bits.encode(v, n, o) for n, v, o in json_has_no_minus_zero]
    assert int8 == [[-1, 127, -128]]
