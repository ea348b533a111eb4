"""The machinery of The GEMM Book: measure, verify, records, pages, status. Run it as `python -m book --help`."""
