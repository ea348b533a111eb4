"""Solutions of the exercises of "How this book proves itself"."""

import ast
import hashlib


# --8<-- [start:ridge]
def ridge_of(record: dict) -> float:
    """The ridge point in FLOP/byte from the rows "matmul" and "copy" of a record: counts over median times, nothing stored."""
    rows = {row["case"]: row for row in record["rows"]}
    for case in ("matmul", "copy"):
        if "ms" not in rows.get(case, {}):
            raise ValueError(f"the record has no timed row '{case}'")
    flops = rows["matmul"]["flop"] / rows["matmul"]["ms"]["p50"]
    bandwidth = rows["copy"]["bytes"] / rows["copy"]["ms"]["p50"]
    return flops / bandwidth


# --8<-- [end:ridge]


# --8<-- [start:fingerprint]
def fingerprint(source: str) -> str:
    """SHA-256 of what a Python source does: comments, docstrings and layout do not count, everything else does.

    Raises:
        SyntaxError: the source is no Python.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


# --8<-- [end:fingerprint]
