"""Variants of the tuned rung: (tile overrides, text patches)."""
W8 = dict(WM=32, WN=64, TM=8, TN=8)
PASS16 = [("constexpr int PASS = 8;", "constexpr int PASS = 16;")]
NOFRAG = [("            load((k + 1) % 2, reading, (k + 1) % BK);\n", "            if (k == BK - 1) load(0, reading, 0); else load((k + 1) % 2, reading, k + 1);\n")]
L2 = [("cp.async.ca.shared.global [", "cp.async.ca.shared.global.L2::128B ["), ("cp.async.cg.shared.global [", "cp.async.cg.shared.global.L2::128B [")]
SNAKE = [("                    acc[i][j] += a[k % 2][i] * b[k % 2][j];", "                    { const int s = i % 2 ? TN - 1 - j : j; acc[i][s] += a[k % 2][i] * b[k % 2][s]; }")]
LATE = [("            if (k == 0) {", "            if (k == 1) {")]
NOCLOBBER = [('"r"(bytes) : "memory");', '"r"(bytes));')]
COLS = [("wy = warp / (BN / WN) * WM + lane / LN * 4", "wy = warp / (BN / WN) * WM + lane % LM * 4"), ("wx = warp % (BN / WN) * WN + lane % LN * 4", "wx = warp % (BN / WN) * WN + lane / LM * 4")]
ZIGZAG = [("wy = warp / (BN / WN) * WM + lane / LN * 4", "wy = warp / (BN / WN) * WM + (lane / (2 * LN) * 2 + lane % 2) * 4"), ("wx = warp % (BN / WN) * WN + lane % LN * 4", "wx = warp % (BN / WN) * WN + lane / 2 % LN * 4")]
JI = [("            for (int i = 0; i < TM; ++i)\n#pragma unroll\n                for (int j = 0; j < TN; ++j)\n                    acc[i][j] += a", "            for (int j = 0; j < TN; ++j)\n#pragma unroll\n                for (int i = 0; i < TM; ++i)\n                    acc[i][j] += a")]
def group(n): return [("#define GROUP 1", f"#define GROUP {n}")]
VARIANTS = {
    "base 8x16": ({}, []),
    "16x8": (dict(TM=16, TN=8), []),
    "8x16 w32x128": (dict(WM=32, WN=128), []),
    "8x16 st4": (dict(STAGES=4), []),
    "8x16 st2": (dict(STAGES=2), []),
    "8x16 bk16 st2": (dict(BK=16, STAGES=2), []),
    "16x8 bk16 st2": (dict(BK=16, STAGES=2, TM=16, TN=8), []),
    "8x16 bk16 st2 pass16": (dict(BK=16, STAGES=2), PASS16),
    "8x16 min3": (dict(MIN_BLOCKS=3), []),
    "8x16 min1": (dict(MIN_BLOCKS=1), []),
    "8x8 min2": (dict(W8), []),
    "8x8 w64x32": (dict(W8, WM=64, WN=32), []),
    "8x8 bk16 st2": (dict(W8, BK=16, STAGES=2), []),
    "8x8 min1": (dict(W8, MIN_BLOCKS=1), []),
    "8x8 min3 (spills)": (dict(W8, MIN_BLOCKS=3), []),
    "128x256 8x16 min1": (dict(BN=256, MIN_BLOCKS=1), []),
    "256x128 8x16 min1": (dict(BM=256, MIN_BLOCKS=1), []),
    "256x128 16x8 min1": (dict(BM=256, TM=16, TN=8, MIN_BLOCKS=1), []),
    "base group8": ({}, group(8)),
    "base L2 hint": ({}, L2),
    "base snake": ({}, SNAKE),
    "base fetch at k=1": ({}, LATE),
    "8x8 group8": (dict(W8), group(8)),
    "8x8 snake": (dict(W8), SNAKE),
    "base lanes by column": ({}, COLS),
    "base zigzag lanes": ({}, ZIGZAG),
    "base j outer": ({}, JI),
    "bk16 noclobber snake": (dict(BK=16, STAGES=2), NOCLOBBER + SNAKE),
    "bk16 zigzag noclobber": (dict(BK=16, STAGES=2), ZIGZAG + NOCLOBBER),
    "bk16 late noclobber": (dict(BK=16, STAGES=2), LATE + NOCLOBBER),
    "8x8 zigzag noclobber": (dict(W8), ZIGZAG + NOCLOBBER),
    "128x256 noclobber snake": (dict(BN=256, MIN_BLOCKS=1), NOCLOBBER + SNAKE),
}
def patched(text, pairs):
    for old, new in pairs:
        assert text.count(old) >= 1, old
        text = text.replace(old, new)
    return text
