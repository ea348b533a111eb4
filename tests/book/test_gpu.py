"""In which order a GPU run proves."""

import json

from book import gpu, verify


def entry(seconds):
    return {"sha256": "0" * 64, "outcome": "passed", "date": "2026-01-01T00:00:00Z", "seconds": seconds, "cases": 1, "versions": {}}


def test_the_longest_proofs_start_first(tmp_path, monkeypatch):
    groups = {name: [verify.Item(f"{name}::{n}", "test", name, "") for n in range(2)] for name in ("short", "long", "half known", "new")}
    past = {"short::0": entry(1.0), "short::1": entry(2.0), "long::0": entry(0.5), "long::1": entry(30.0), "half known::0": entry(0.1), "half known::1": {"sha256": ""}}
    path = verify.verified_path("some-gpu", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"device": {"name": "some"}, "items": past}), encoding="utf-8")
    monkeypatch.setattr(verify, "problems_of", lambda *_: [])
    assert gpu.longest_first(groups, "some-gpu", tmp_path) == ["half known", "new", "long", "short"]
    assert gpu.longest_first(groups, "another-gpu", tmp_path) == sorted(groups)
