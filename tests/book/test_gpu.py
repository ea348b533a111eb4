"""In which order a GPU run proves."""

import json

import pytest

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


@pytest.mark.parametrize("options, proofs, measured", [({}, ["b"], ["y/new"]), ({"prove_all": True}, ["a", "b"], ["y/new"]), ({"everything": True}, ["a", "b"], ["y/new", "y/old"])])
def test_what_a_run_takes_on(options, proofs, measured, monkeypatch, capsys, tmp_path):
    items = {key: verify.Item(key, "test", f"tests/{key}.py", "") for key in "ab"}
    ran, timed = [], []
    monkeypatch.setenv("BOOK_RUN", "20260101T000000Z")
    monkeypatch.setattr(gpu.device, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu.device, "describe", lambda: {"name": "some GPU"})
    monkeypatch.setattr(gpu.device, "folder", lambda about: "some-gpu")
    monkeypatch.setattr(verify, "expected", lambda root: items)
    monkeypatch.setattr(verify, "unverified", lambda root, folder: [("b", "changed")])
    monkeypatch.setattr(verify, "run_source", lambda source, group, root: ran.extend(item.key for item in group) or {item.key: entry(1.0) for item in group})
    monkeypatch.setattr(verify, "merge", lambda found, about, folder, root: root / "records/some-gpu/verified.json")
    monkeypatch.setattr(gpu.records, "snippets", lambda root: ["y/old", "y/new"])
    monkeypatch.setattr(gpu, "needs_measuring", lambda name, folder, root: name == "y/new")
    monkeypatch.setattr(gpu, "measure_each", lambda names, *_: timed.extend(names) or iter(()))
    everything = options.get("everything", False)
    assert gpu.gpu(None, 1, everything, [], 10, tmp_path, prove_all=options.get("prove_all", False)) == 0
    assert sorted(ran) == proofs and sorted(timed) == measured
    assert f"{len(proofs)} items in {len(proofs)} processes to prove, {len(measured)} snippets to measure" in capsys.readouterr().out
