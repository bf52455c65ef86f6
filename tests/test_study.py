"""Studies: plans are checked, runs side by side leave outcomes and are not run twice, differences are by seed."""

import json
import os
import re
import shlex
import signal
from dataclasses import asdict, replace
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from study_pieces import ARMS, SMALL, outcome, work
from test_cli import run_main

from fastweight.evaluation.checkpoint import checkpoint_of, load_model
from fastweight.evaluation.outcomes import Outcome, Scoring
from fastweight.recipes import DrawnTask, load_recipe
from fastweight.study import workers
from fastweight.study.plan import Study, load_study, study_names
from fastweight.study.report import write_study
from fastweight.study.runner import Job, _places, add_known, member_dir, read_outcomes, run_study
from fastweight.tasks.scoring import all_hits
from fastweight.training.model import config_of


def test_a_setting_replaces_the_studys_own():
    """Told once, as it is trained."""
    study = load_study("pairing-recall", settings=["model.mixer=falcon-1"])
    assert [setting for setting in study.settings if setting.startswith("model.mixer=")] == ["model.mixer=falcon-1"]
    assert study.run("next, after", 0).model["mixer"] == "falcon-1"


@pytest.mark.parametrize("name", study_names())
def test_every_arm_of_every_study_builds_and_arms_differ_in_what_they_say(name):
    study = load_study(name)
    assert study.about
    assert study.against in study.arms
    runs = [study.run(arm, 0) for arm in study.arms]
    told = {
        json.dumps([config_of(run).to_dict(), str(run.task), str(run.optimizer), str(run.training)], sort_keys=True)
        for run in runs
    }
    assert len(told) == len(study.arms)
    assert {study.run(arm, 3).training.seed for arm in study.arms} == {3}


def test_the_cells_of_pairing_and_timing_are_all_four_and_nothing_else_differs():
    for rule in ("falcon-1", "falcon-1a", "falcon-3a"):
        study = load_study(f"pairing-{rule}")
        models = [study.run(arm, 0).model for arm in study.arms]
        defaults = load_recipe("addition-least-first", [f"model.mixer={rule}.3"]).model
        cells = {(m.get("pairing", "next-latent"), m.get("timing", "read-after-write")) for m in models}
        assert len(cells) == 4
        for model in models:
            assert {k: v for k, v in model.items() if k not in ("pairing", "timing")} == defaults


def test_members_go_through_the_arms_before_the_next_seed():
    study = Study("a", "b", "parity-tiny", ARMS, "mamba2", seeds=2)
    assert study.members() == [("falcon-1", 0), ("mamba2", 0), ("falcon-1", 1), ("mamba2", 1)]


def scored(name, scoring):
    return run_study(load_study(name), Path("nowhere"), workers=1, scoring=scoring)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: load_study("nothing"), "study: got 'nothing'"),
        (lambda: load_study("mqar", only=["falcon-9"]), "--only"),
        (lambda: load_study("mqar", seeds=0), "seeds"),
        (lambda: load_study("mqar", ["training.seed=8"]), "expected --seeds"),
        (
            lambda: load_study("addition", ["model.intermediate_size=8"]),
            "--set: got model.intermediate_size, .* retnet",
        ),
        (lambda: Study("a", "b", "parity-tiny", ARMS, "x"), "against"),
        (lambda: Study("a", "b", "parity-tiny", ARMS, "mamba2", scored="x"), "study.scored: got 'x'"),
        (lambda: run_study(load_study("mqar", ["model.x.y"]), Path("nowhere"), workers=1), "KEY=VALUE"),
        (lambda: run_study(load_study("mqar"), Path("nowhere"), workers=0), "workers"),
        (lambda: run_study(load_study("lm-small"), Path("nowhere"), workers=1), "data: got none for a study on text"),
        (lambda: scored("mqar", Scoring(generate=True)), "generate: got a study of the task mqar"),
        (lambda: scored("addition", Scoring(texts={"page": "x"})), "texts: got a study of the task addition"),
        (lambda: scored("lm-small", Scoring(texts={"validation": "x"})), "texts: got the name validation"),
    ],
)
def test_wrong_plans_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_a_study_runs_side_by_side_and_is_not_run_twice(tmp_path, monkeypatch):
    plan = tmp_path / "plan.yaml"
    lines = [f"recipe: parity-tiny\nsettings: {json.dumps(SMALL)}", f"arms: {json.dumps(ARMS)}", "seeds: 1"]
    plan.write_text("\n".join(lines))
    out = tmp_path / "out"
    words = ["study", str(plan), "--out", str(out), "--workers", "2"]
    assert run_main(monkeypatch, *words) == 0
    told = json.loads((out / "study.json").read_text())
    assert [o["arm"] for o in told["outcomes"]] == list(ARMS)
    assert told["made"][0]["command"] == " ".join(["fastweight", *words])
    assert all(file.is_file() for file in (out / "README.md", out / "study.png"))
    study = load_study(str(plan))
    before = read_outcomes(study, out)
    assert isinstance(before[0], Outcome)
    assert before[0].sizes == [4, 8]
    assert run_study(study, out, workers=1, budget=0.0) == before
    assert run_main(monkeypatch, *words[:3], str(tmp_path / "none"), "--budget", "0") == 1  # nothing to report
    assert not (tmp_path / "none").exists()
    (member_dir(out, "mamba2", 0) / "outcome.json").unlink()
    assert run_study(study, out, workers=1, budget=0.0) == before[:1]  # no time: nothing is trained
    report = tmp_path / "report"
    dirs = [str(member_dir(out, arm, 0)) for arm in ARMS]
    assert run_main(monkeypatch, "eval", "task", *dirs, "--out", str(report)) == 0
    again = json.loads((report / "study.json").read_text())["outcomes"]
    assert [o["shares"] for o in again] == [o["shares"] for o in told["outcomes"]]


def test_a_worker_that_failed_or_died_is_replaced_and_gpus_take_turns():
    told = dict(workers.run_pieces([(i,) for i in range(5)], work, 2, gpus=["4", "5"]))
    assert told[2,] == "failed: its process ended with code 7"
    said = {n[0]: text.split() for n, text in told.items() if n != (2,)}
    assert sorted(said) == [0, 1, 3, 4]
    assert sum(words[2] == said[1][2] for words in said.values()) == 1, "nothing follows a failure in its process"
    assert {words[4] for words in said.values()} == {"4", "5"}
    assert list(workers.run_pieces([(0,)], work, 1, end=0.0)) == [], "no time: nothing is done"


def test_a_worker_goes_on_with_pieces_of_its_kind(monkeypatch):
    """It takes the first of another kind only when there is none."""
    given = []
    monkeypatch.setattr(workers, "_hired", lambda work, gpu, piece: workers._Worker(None, Pipe(), gpu, piece))
    monkeypatch.setattr(workers, "_given", lambda worker, piece: given.append(piece) or worker._replace(piece=piece))
    monkeypatch.setattr(workers, "_answer", lambda worker: (True, "done"))
    monkeypatch.setattr(workers, "wait", lambda pipes, timeout: pipes[:1])
    pieces = [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1)]
    done = [piece for piece, _ in workers.run_pieces(pieces, work, 2, gpus=["0"], kind=lambda piece: piece[0])]
    assert sorted(done) == sorted(pieces)
    assert given == [("a", 1), ("b", 1), ("c", 0), ("c", 1)]


class Pipe:
    def close(self):
        pass


def test_what_settings_are_chosen_by_is_neither_the_test_nor_longer(tmp_path):
    """Other problems of the training sizes; and neither kind of outcome counts as one of the other."""
    study = Study("sweep", "", "parity-tiny", {"falcon-1": ARMS["falcon-1"]}, "falcon-1", SMALL, 1, scored="validation")
    (chosen,) = run_study(study, tmp_path / "sweep", workers=1, say=str)
    assert isinstance(chosen, Outcome)
    assert chosen.sizes == [4]
    task = study.run("falcon-1", 0).task
    assert isinstance(task, DrawnTask)
    model = load_model(checkpoint_of(member_dir(tmp_path / "sweep", "falcon-1", 0), say=str))
    own, other = (task.held_out(4, 8, stream) for stream in ("validation", "test"))
    assert not own.input_ids.equal(other.input_ids)
    assert chosen.shares["token"] == [float(all_hits(model, own.input_ids, own.labels).double().mean())]
    file, told, _ = write_study(study, [chosen], tmp_path, [{"commit": "abc"}])
    assert "not of the test" in told.read_text()
    with pytest.raises(ValueError, match="holds no outcome"):
        add_known(replace(study, scored="test"), tmp_path / "test", [file])
    sums = load_study("addition-sweep", ["task.train_widths=[1, 2]", "task.test_widths=[3, 4]"])
    assert sums.scored == "validation"


def test_a_study_that_is_stopped_reports_what_is_done(tmp_path, monkeypatch):
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"recipe: parity-tiny\nsettings: {json.dumps(SMALL)}\narms: {json.dumps(ARMS)}\nseeds: 1\n")
    study = load_study(str(plan))

    def stopped_after_one(pieces, work, workers, end, gpus, kind):
        assert gpus == [""], "a study on the CPU shows its workers no GPU"
        place = member_dir(out, *study.members()[0])
        place.mkdir(parents=True)
        (place / "outcome.json").write_text(json.dumps(asdict(outcome("falcon-1", 0, 0.5, 0.25))))
        yield pieces[0], "done"
        os.kill(os.getpid(), signal.SIGTERM)

    out, before = tmp_path / "out", signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("fastweight.study.runner.run_pieces", stopped_after_one)
    try:
        assert run_main(monkeypatch, "study", str(plan), "--out", str(out)) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    told = json.loads((out / "study.json").read_text())
    assert [o["arm"] for o in told["outcomes"]] == ["falcon-1"]
    assert told["made"][0]["device"].startswith("CPU")
    assert "1 of 2 runs have no outcome" in (out / "README.md").read_text()


def test_studies_share_processes_and_what_they_have_in_common(tmp_path, monkeypatch, capfd):
    """A member of two studies is trained once, for the first, and both report it under their own names."""
    plans = []
    for name, arms in (("one", ARMS), ("two", {"memory": ARMS["falcon-1"], "other": ["model.mixer=retnet"]})):
        plans.append(tmp_path / f"{name}.yaml")
        plans[-1].write_text(
            f"recipe: parity-tiny\nsettings: {json.dumps(SMALL)}\narms: {json.dumps(arms)}\nseeds: 1\n"
        )
    trained = []

    def in_this_process(pieces, work, workers, end, gpus, kind):
        for _, place, arm, seed, _ in pieces:
            trained.append(arm)
            place.mkdir(parents=True)
            (place / "outcome.json").write_text(json.dumps(asdict(outcome(arm, seed, 0.5, 0.25))))
            yield (None, place, arm, seed, None), "done"

    monkeypatch.setattr("fastweight.study.runner.run_pieces", in_this_process)
    before = signal.getsignal(signal.SIGTERM)
    words = ["study", *map(str, plans), "--out", str(tmp_path / "out"), "--report", str(tmp_path / "report")]
    try:
        assert run_main(monkeypatch, *words) == 0
        assert trained == ["falcon-1", "mamba2", "other"]
        assert run_main(monkeypatch, *words, "--known", str(tmp_path / "report" / "one" / "study.json")) == 0
        assert len(trained) == 3
        assert run_main(monkeypatch, "study", str(plans[0]), str(plans[0])) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "two: other seed 0: done" in capfd.readouterr().err
    told = json.loads((tmp_path / "report" / "two" / "study.json").read_text())
    assert [o["arm"] for o in told["outcomes"]] == ["memory", "other"]
    assert (tmp_path / "out" / "two" / "memory" / "seed-0" / "outcome.json").is_file()


def test_what_others_trained_counts_as_done_where_it_is_the_same(tmp_path, monkeypatch):
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"recipe: parity-tiny\nsettings: {json.dumps(SMALL)}\narms: {json.dumps(ARMS)}\nseeds: 2\n")
    study = load_study(str(plan))
    files = []
    for seed, commit in enumerate("ab"):
        here = [outcome(arm, seed, 0.5 + 0.1 * seed, 0.25) for arm in ARMS]
        files.append(write_study(study, here, tmp_path / commit, [{"commit": commit}])[0])
    known = [word for file in files for word in ("--known", str(file))]
    words = ["study", str(plan), "--out", str(tmp_path / "out"), "--report", str(tmp_path / "report"), "--budget", "0"]
    assert run_main(monkeypatch, *words, *known[:2]) == 1  # half of it is missing
    assert run_main(monkeypatch, *words, *known) == 0
    told = json.loads((tmp_path / "report" / "study.json").read_text())
    assert told["made"] == [{"commit": "a"}, {"commit": "b"}]
    assert [(o["arm"], o["seed"]) for o in told["outcomes"]] == study.members()
    # The same settings under another name, in another order, with another path of what only watches.
    arms = {"memory": ["training.log_every=7", *ARMS["falcon-1"]], "new": ["model.mixer=retnet"]}
    other = Study("other", "", "parity-tiny", arms, "memory", SMALL, seeds=2)
    add_known(other, tmp_path / "other", files)
    assert [(o.arm, o.seed, o.mixer) for o in read_outcomes(other, tmp_path / "other")] == [
        ("memory", 0, "falcon-1"),
        ("memory", 1, "falcon-1"),
    ]
    for changed in ("training.steps=3", "task.test_problems=3"):  # another training, another test
        with pytest.raises(ValueError, match=r"--known: .* holds no outcome"):
            add_known(load_study(str(plan), [changed]), tmp_path / "other", files)
    with pytest.raises(ValueError, match=r"--known: got .*nowhere"):
        add_known(study, tmp_path / "other", [tmp_path / "nowhere"])


def test_the_arms_of_a_study_on_another_recipe_have_a_name_of_their_own():
    study = load_study("pairing-falcon-1", recipe="mqar-tiny")
    assert study.name == "pairing-falcon-1-mqar-tiny"
    assert study.run("same, after", 1).task == load_recipe("mqar-tiny").task
    assert study.arms == load_study("pairing-falcon-1").arms


def test_the_commands_of_the_documentation_name_what_there_is():
    """Studies, arms and settings; and where a table tells how many runs there are, so many are trained."""
    page = Path(__file__).parents[1].joinpath("docs", "experiments.md").read_text()
    told = {
        line.split("|")[2].strip(" `"): line.split("|")[3]
        for line in page.splitlines()
        if "| `fastweight study" in line
    }
    assert len(told) == 10
    told |= dict.fromkeys(re.findall(r"^fastweight study .*", page, flags=re.MULTILINE), "")
    for command, runs in told.items():
        words = shlex.split(command.partition("`")[0])[2:]
        names = list(takewhile(lambda word: not word.startswith("--"), words))
        given = [(word, after) for word, after in pairwise(words) if word.startswith("--")]
        only, settings = ([after for word, after in given if word == option] for option in ("--only", "--set"))
        options = dict(given)
        seeds = int(options["--seeds"]) if "--seeds" in options else None
        plans = [load_study(name, settings, seeds, only, options.get("--recipe")) for name in names]
        places = _places([Job(plan, Path(plan.name)) for plan in plans])
        if runs:
            known = len(_places([Job(load_study("mqar"), Path("mqar"))]).keys() & places) if "--known" in options else 0
            assert sum(map(int, re.findall(r"\d+", runs))) == len(places) - known, command
