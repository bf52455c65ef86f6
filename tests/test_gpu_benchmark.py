"""The GPU benchmark without a GPU: its gate sees wrong code, one bad case costs one row, and the report says so."""

import json
import sys
from functools import partial

import pytest
import torch

from benchmarks import gpu, gpu_cases, gpu_child, gpu_kernels, gpu_report, gpu_worker
from benchmarks.gpu_cases import CASES, OPS, SHAPES, Case

RATES = {"copy_bytes_per_s": 4e12, "bf16_flop_per_s": 7e14}
SMALL = (2, 20, 2, 8)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(gpu_worker, "inputs", partial(gpu_cases.inputs, device="cpu"))
    monkeypatch.setattr(gpu_worker, "slice_of", lambda shape: SMALL)


def exact(name: str):
    return lambda given: gpu_cases.public(OPS[name], given, form="chunk", backend="torch")


@pytest.mark.parametrize("regime", gpu_cases.REGIMES)
@pytest.mark.parametrize("name", OPS)
def test_gate_passes_the_torch_form_in_every_regime(name, regime, on_cpu):
    found = gpu_worker.errors(Case(name, name, lambda: exact(name)), exact(name), SHAPES[0], regime)
    given = gpu_cases.inputs(OPS[name], SMALL, device="cpu")
    assert set(found) == {"o"} | {part for part, value in given.items() if value is not None}
    assert max(found.values()) <= gpu_cases.ALLOWED


def test_gate_sees_a_wrong_gradient(on_cpu, monkeypatch):
    def call(given):
        return exact("falcon-1")(given | {"beta": given["beta"].detach()}) + 0 * given["beta"].sum()

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu_worker, "whole", lambda *_: {"o": 0.0})
    row = gpu_worker.check(Case("falcon-1", "falcon-1", lambda: call, peer=False), call, SHAPES[0])
    assert row["wrong"]
    assert row["errors"]["usual"]["beta"] == pytest.approx(1)
    assert row["errors"]["usual"]["o"] < gpu_cases.ALLOWED
    assert "WRONG" in gpu_report.line({"op": "falcon-1", "shape": SHAPES[0], **row}, RATES)


def test_gate_sees_rows_that_depend_on_the_others(on_cpu, monkeypatch):
    def call(given):
        return exact("falcon-1a")(given) * (1 + 0.1 * len(given["v"]))

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    case = Case("falcon-1a", "falcon-1a", lambda: call, peer=False)
    assert max(gpu_worker.whole(case, exact("falcon-1a"), (4, 9, 2, 8)).values()) < 1e-6
    assert gpu_worker.whole(case, call, (4, 9, 2, 8))["o"] == pytest.approx(1.4 / 1.2 - 1, rel=0.1)
    assert gpu_worker.whole(case, lambda given: call(given) * float("nan"), (4, 9, 2, 8))["o"] == float("inf")


def test_floor_counts_every_tensor_once():
    shape = (1, 64, 1, 128)
    (forward, work), (train, _) = gpu_cases.cost(OPS["falcon-1a"], shape)
    assert forward == 64 * (4 * 128 * 2 + 2 * 4)  # q, k, v, o in 16 bits, two gates in 32
    assert train - forward == 64 * (7 * 128 * 2 + 6 * 4)  # q, k, v, d_o in, three gradients out, gates and theirs
    assert work == 64 * (2 * 2 * 128 * 128 + 2 * 2 * 64 * 128)
    assert gpu_cases.cost(OPS["falcon-2a"], shape)[0][0] - forward == 64 * (4 * 128 - 4)
    low = gpu_cases.floors(OPS["falcon-1"], SHAPES[1], RATES)
    assert low[0] == pytest.approx(1e3 * 2**20 * 1032 / 4e12)


def test_targets_are_judged_only_against_what_was_timed():
    shape = list(SHAPES[0])
    rows = [
        {"op": "falcon-1", "shape": shape, "forward_ms": 0.3, "train_ms": 0.8},
        {"op": "FlashQLA gated delta rule", "shape": shape, "forward_ms": 0.2, "train_ms": 1.0},
        {"op": "falcon-1a", "shape": shape, "failed": "no"},
    ]
    found = {target: ratio for target, at, ratio in gpu_report.verdicts({"rows": rows}) if at == SHAPES[0]}
    known = {(t.label, t.mode, t.against): ratio for t, ratio in found.items() if ratio is not None}
    rival = "FlashQLA gated delta rule"
    assert known == {("falcon-1", "train", rival): 0.8, ("falcon-1", "forward", rival): pytest.approx(1.5)}


WORKER = """
import json, sys, time
label = sys.argv[1]
say = lambda **what: print("@" + json.dumps(what), flush=True)
if label == "first":
    say(kind="first", label=sys.argv[2], seconds=0.5)
    raise SystemExit
if label == "falcon-1a": raise SystemExit("broken on purpose")
say(kind="first", label=label, seconds=1.5)
shape = [64, 1024, 6, 128]
say(kind="checked", label=label, shape=shape, errors={"usual": {"o": 1e-3}}, wrong=False)
say(kind="warm", label=label)
for number, line in enumerate(sys.stdin):
    if label == "falcon-3a": time.sleep(60)
    say(kind="row", label=label, shape=shape, forward_ms=0.5 + number, train_ms=2.0 + number, peak_mib=9, host_us=7)
"""


def test_one_bad_case_costs_one_row(tmp_path, monkeypatch):
    """A case that hangs is killed, one that breaks is reported, the rest is timed twice and written."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    for module in (gpu, gpu_child):
        monkeypatch.setattr(module, "WORKER", (sys.executable, str(script)))
    monkeypatch.setattr(gpu, "BOX", 2.0)
    monkeypatch.setattr(gpu, "ceilings", lambda: RATES)
    monkeypatch.setattr(gpu, "machine", lambda: dict.fromkeys(("device", "torch", "triton", "commit", "command"), "x"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu.main(["--out", str(tmp_path), "--only", "falcon-1", "falcon-1a", "falcon-3a", "--shapes", "0", "--first"])
    found = json.loads((tmp_path / "gpu.json").read_text())
    rows = {row["op"]: row for row in found["rows"]}
    assert rows["falcon-1"]["train_ms"] == 2.5
    assert rows["falcon-1"]["rounds"]["train_ms"] == [2.0, 3.0]
    assert "broken on purpose" in rows["falcon-1a"]["failed"]
    assert "out of time" in rows["falcon-3a"]["failed"]
    assert rows["falcon-3a"]["errors"] == {"usual": {"o": 1e-3}}
    assert found["first_call_s"]["falcon-1"] == 1.5
    assert found["first_call_alone_s"]["falcon-1"] == 0.5
    report = (tmp_path / "gpu.md").read_text()
    assert "| falcon-1 | 0.500" not in report
    assert "1.000" in report
    assert "| falcon-1 | 1.5 | 0.5 |" in report
    assert "broken on purpose" in report
    assert (tmp_path / "roofline.png").stat().st_size > 10_000


TUNED = """
import json, os, sys, time
say = lambda **what: print("@" + json.dumps(what), flush=True)
when, label, number = sys.argv[1:]
done = os.path.join(os.environ["TRITON_CACHE_DIR"], "tuned")
if when == "tune":
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    time.sleep(0.5)
    os.makedirs(done)
    raise SystemExit
assert sys.stdin.readline() == "go\\n" and os.path.isdir(done)
shape = [64, 1024, 6, 128]
say(kind="warm", label=label)
for line in sys.stdin:
    say(kind="row", label=label, shape=shape, forward_ms=0.5, train_ms=2.0, peak_mib=9, host_us=7)
"""


def test_a_library_that_tunes_itself_does_so_on_the_second_device_first(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(TUNED)
    monkeypatch.setattr(gpu_child, "WORKER", (sys.executable, str(script)))
    monkeypatch.setattr(gpu, "ceilings", lambda: RATES)
    monkeypatch.setattr(gpu, "machine", lambda: dict.fromkeys(("device", "torch", "triton", "commit", "command"), "x"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpu, "RESERVE", 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    cache = tmp_path / "kept"
    arguments = ["--only", "FLA gated delta rule", "--shapes", "0", "--seconds", "20", "--cache", str(cache)]
    gpu.main(["--out", str(tmp_path), *arguments])
    assert (cache / "triton_cache_dir" / "tuned").is_dir()
    (row,) = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert row["rounds"]["train_ms"] == [2.0, 2.0]


def test_every_label_is_known_and_shapes_fit_widths():
    assert CASES["FlashQLA gated delta rule"].shapes() == [shape for shape in SHAPES if shape[3] == 128]
    assert CASES["FLA gated delta rule"].shapes() == list(SHAPES)
    assert len(gpu_report.COLOURS) >= len(OPS)
    for target in gpu_cases.TARGETS:
        assert {target.label, target.against} <= set(CASES)
    with pytest.raises(SystemExit, match="--only"):
        gpu.main(["--only", "nobody"])


def test_kernels_of_a_step_by_their_share():
    found = gpu_kernels.table([("small", 3.0, 3), ("tiny", 0.3, 3), ("large", 6000.0, 6)])
    assert found == ["   2.001 ms", "   2.000 ms  x2  large", "   0.001 ms  x1  small"]
    for words in ([], ["falcon-1"], ["falcon-9", "0"], ["falcon-1", "9"]):
        with pytest.raises(SystemExit, match="arguments: got"):
            gpu_kernels.main(words)
