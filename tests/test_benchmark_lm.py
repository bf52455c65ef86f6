"""The language-model benchmark without a GPU: cases take turns, failures and time boxes cost one case, reports read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import lm, lm_report
from fastweight.recipes import load_recipe, recipe_names

# Stands for a worker: waits for its turn and measures, noting when; "wrong" dies and "slow" never gets ready.
FAKE = """
import json, sys, time
case = sys.argv[1]
what, name, batch, length = case.split()
print("a warning", flush=True)
if name == "wrong": raise SystemExit("no such kernel")
if name == "slow": time.sleep(600)
if name == "third" and what == "train":
    print("@" + json.dumps({"kind": "ready", "first_step_s": 1}), flush=True)
    assert sys.stdin.readline() == "go\\n"
    said = {"kind": "result", "case": case, "what": what, "name": name, "batch": 1, "length": 2}
    print("@" + json.dumps(said | {"tokens_per_second": [5], "parameters": 1, "peak_gib": 1}), flush=True)
    print("@" + json.dumps({"kind": "done"}), flush=True)
    case = sys.argv[2]
    what, name, batch, length = case.split()
print("noise\\n@" + json.dumps({"kind": "ready", "first_step_s": 1.0}), flush=True)
assert sys.stdin.readline() == "go\\n"
with open(sys.argv[0] + ".log", "a") as log:
    print("begin", file=log, flush=True)
    time.sleep(0.2)
    print("end", file=log, flush=True)
batch = int(batch)
rates = [batch * 100, batch * 90, batch * 110]
extra = {"prefill_tokens_per_second": 5, "cuda_graph": True} if what == "decode" else {}
extra |= {"batch": batch, "length": int(length), "parameters": 10**8, "peak_gib": 2.5}
said = {"kind": "result", "case": case, "what": what, "name": name, "tokens_per_second": rates} | extra
print("@" + json.dumps(said), flush=True)
if what == "decode": print("@" + json.dumps(said | {"batch": 3, "tokens_per_second": [7]}), flush=True)
"""


def test_cases_take_turns_and_failures_cost_one_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    monkeypatch.setattr(lm, "WORKER", (sys.executable, str(fake)))
    monkeypatch.setattr(lm, "machine", lambda: {"device": "none", "torch": "0", "commit": "x", "command": "python"})
    done = lm.Collected(tmp_path / "out" / "lm.json", add=False)
    cases = ["train first 8 16", "train slow 8 16", "train wrong 8 16", "train second 4 16", "decode first 2 16"]
    cases += ["train third 1 2 + decode third 2 16 + train lost 3 4"]
    lm.run(cases, limit=60, box=6, profile=None, caches=str(tmp_path), done=done)
    found = json.loads((tmp_path / "out" / "lm.json").read_text())["rows"]
    rows = {(row["what"], row["name"]): row for row in found}
    assert len(found) == 10
    assert set(rows) == {tuple(case.split()[:2]) for joined in cases for case in joined.split(" + ")}
    assert "failed" in rows["train", "lost"]
    assert "failed" not in rows["train", "third"]
    assert "no such kernel" in rows["train", "wrong"]["failed"]
    assert "took too long" in rows["train", "slow"]["failed"]
    assert rows["train", "second"]["tokens_per_second"] == [400, 360, 440]
    log = (tmp_path / "fake.py.log").read_text().split()
    assert log == ["begin", "end"] * 4  # never two at a time
    files = lm_report.write_report(tmp_path / "out" / "lm.json")
    text = files[1].read_text()
    assert "| first (*) | 100.0M | 800 | 720 to 880 | 0.1 % | 2.5 | 1 |  |" in text
    assert "(*) Not steady" in text
    assert "| first | 200 | yes | 5 | 2.5 |" in text
    assert "| first | 7 | yes | 5 | 2.5 |" in text
    assert "* train wrong 8 x 16" in text
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_every_case_names_a_recipe_or_a_peer() -> None:
    cases = [case for half in lm.lanes() for joined in half for case in joined.split(lm.JOINED)]
    assert len(cases) == len(set(cases))
    names = {case.split()[1] for case in cases}
    assert names - set(lm_report.PEERS) <= set(recipe_names())
    texts = {name for name in recipe_names() if load_recipe(name).task.kind == "text"}
    assert {name for name in texts if not name.startswith("lm-")} <= names


def test_what_is_wanted_most_comes_first_and_the_plan_says_when(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = lm.lanes()
    assert first[0] == "train falcon-1.3 32 1024"
    assert second[0].startswith("train fla 32 1024")
    kinds = [case.split()[0] + case.split()[-1] for case in second[1:]]
    assert kinds == sorted(kinds, key=lambda kind: kind.startswith("decode"))  # decoding last
    lm.announce([second[0], *first[:6]], limit=130)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "about   66 s  train falcon-1.3 32 1024"  # not FLA's, which is ready later
    assert lines[4].startswith("about   90 s")
    assert lines[5].startswith("about  156 s")  # began at 66, stood still while four were measured
    assert lines[6].endswith("train fla 32 1024 + train fla 2 16384   beyond the limit")


def test_fla_is_left_out_where_it_is_missing_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ["train fla 32 1024 + train fla 2 16384", "train falcon-1.3 32 1024", "decode fla 1 2"]
    for have, triton, kept in (
        ({"fla", "tilelang"}, (3, 6, 0), cases),
        ({"fla"}, (3, 6, 0), cases[1:]),
        ({"fla"}, (3, 8, 0), cases),
        (set(), (3, 8, 0), cases[1:2]),
    ):
        monkeypatch.setattr(lm.importlib.util, "find_spec", lambda name, have=have: name in have or None)
        monkeypatch.setattr(lm, "_version", lambda name, triton=triton: triton)
        assert lm.runnable(cases) == kept


def test_an_end_from_outside_leaves_no_worker_and_a_report(tmp_path: Path) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    code = f"""
import sys
from benchmarks import lm
lm.WORKER = (sys.executable, {str(fake)!r})
lm.machine = lambda: {{"device": "none", "torch": "0", "commit": "x", "command": "python"}}
start = lm.start
def noted(*given):
    worker = start(*given)
    print("worker", worker.process.pid, flush=True)
    return worker
lm.start = noted
lm.main(["--cases", "train first 8 16", "train slow 8 16", "--out", {str(tmp_path / "lm.json")!r}])
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None, "it was asked for"
    workers = []
    for line in process.stdout:
        workers += [int(line.split()[1])] if line.startswith("worker") else []
        if line.startswith("{"):
            process.terminate()
            break
    rest = process.stdout.read()
    process.stdout.close()
    assert process.wait() == 0
    assert rest.split() == [str(tmp_path / f"lm{ending}") for ending in (".json", ".md", ".png")]
    assert "| first (*) | 100.0M |" in (tmp_path / "lm.md").read_text()
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
