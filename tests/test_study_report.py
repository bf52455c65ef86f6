"""Reports of studies: tables and pictures, the page of all results, what holds of the paper's claims."""

import re
from dataclasses import replace

import pytest
from study_pieces import ARMS, SMALL, outcome

from fastweight.evaluation.outcomes import Outcome
from fastweight.models.cost import state_bytes
from fastweight.study.claims import Trained, sentences, verdict
from fastweight.study.effects import comparisons, paired, sides
from fastweight.study.plan import Study, load_study
from fastweight.study.report import KNOWING, difference, page, spread, write_study
from fastweight.study.runner import run_study
from fastweight.training.model import config_of


def test_differences_are_taken_seed_by_seed():
    ours = [outcome("a", seed, 0.5, 0.1 * seed) for seed in (0, 1, 2)]
    theirs = [outcome("b", seed, 0.4, 0.1 * seed - 0.2) for seed in (2, 1)]
    assert paired(ours, theirs, "token", longer=True) == pytest.approx([0.2, 0.2])
    assert difference([0.2, 0.2]) == "+20.0 ± 0.0"
    assert difference([0.1, 0.3]) == "+20.0 ± 10.0"  # standard deviation 14.1 over the root of 2
    assert difference([]) == "-"
    assert spread([0.5]) == "50.0"
    assert spread([0.4, 0.6]) == "50.0 ± 14.1"


def test_variants_of_a_name_are_compared_within_it():
    square = list(load_study("pairing-falcon-1").arms)
    assert [words for words, _, _ in comparisons(square)] == [
        "next: before against after",
        "same: before against after",
        "after: same against next",
        "before: same against next",
    ]
    assert comparisons(["a", "a, x", "b, x", "b, y", "c, x"]) == [
        ("a: x", "a, x", "a"),
        ("b: y against x", "b, y", "b, x"),
    ]
    assert comparisons(["a", "b"]) == []
    study = Study("a", "b", "parity-tiny", {"m, 1": [], "m, 2": ["model.mixer=mamba2"], "n, 2": []}, "m, 1", seeds=2)
    runs = [outcome("m, 1", 0, 0.5, 0.25), outcome("m, 2", 0, 0.5, 0.35), outcome("m, 2", 1, 0.5, 1.0)]
    assert "| m: 2 against 1 | 1 | +0.0 | +10.0 |" in page(study, runs, [], "x.png")


def test_a_square_is_compared_side_by_side_too():
    """The mean over both variants, seed by seed, of the seeds that all four arms have."""
    study = replace(load_study("pairing-falcon-1"), recipe="parity-tiny", seeds=3)
    shares = {"next, after": 0.9, "next, before": 0.7, "same, after": 0.5, "same, before": 0.5}
    runs = [outcome(arm, seed, 0.5, share - 0.1 * seed) for arm, share in shares.items() for seed in (0, 1)]
    runs.append(outcome("next, after", 2, 0.5, 0.9))
    groups = {arm: [run for run in runs if run.arm == arm] for arm in shares}
    found = sides(list(shares), groups)
    assert list(found) == ["next", "same", "after", "before"]
    assert [both.seed for both in found["next"]] == [0, 1]
    assert paired(found["next"], found["same"], "token", longer=True) == pytest.approx([0.3, 0.3])
    assert sides(["a, x", "b, y"], groups) == {}
    told = page(study, runs, [], "x.png")
    assert "| same against next, over both | 2 | +0.0 ± 0.0 | -30.0 ± 0.0 |" in told
    assert "| before against after, over both | 2 | +0.0 ± 0.0 | -10.0 ± 0.0 |" in told
    (claim,) = sentences([Trained("here", study, groups)])
    assert "over both: **holds** (+30.0 ± 0.0 points, 2 seeds)" in claim


def test_a_page_says_what_is_missing():
    study = Study("a", "b", "parity-tiny", ARMS, "mamba2", seeds=1)
    told = page(study, [outcome("falcon-1", 0, 0.5, 0.25)], [{"commit": "abc"}], "x.png")
    assert "1 of 2 runs have no outcome" in told
    both = [outcome("falcon-1", 0, 0.5, 0.25), outcome("mamba2", 0, 0.5, 0.25)]
    both[1].shares["generated"] = [0.5, 0.125]
    last = page(study, both, [], "x.png").partition("free generation")[2]
    assert "| mamba2 | 1 | 1,000 | 50.0 | 12.5 |" in last
    assert "falcon-1" not in last, "only what was generated is told of"
    assert re.search(r"\| falcon-1 \| 1 \| 1,000 \| 50\.0 \| 25\.0 \| - \|", told)
    with pytest.raises(ValueError, match="holds no outcome"):
        write_study(study, [], None, [])  # type: ignore[arg-type]


def test_a_report_holds_every_section_the_papers_figures_and_what_is_open(tmp_path):
    from fastweight.evaluation import paper
    from fastweight.study.collect import collect, write_collection

    with pytest.raises(ValueError, match="expected a directory with results"):
        collect(tmp_path)
    one = tmp_path / "one"
    one.mkdir()
    (one / "README.md").write_text("# One\n\n![A](a.png) and [b](b.json)\n\n```bash\n# no heading\n```\n")
    with pytest.raises(ValueError, match=r"a\.png"):
        write_collection(tmp_path, tmp_path)
    (one / "a.png").write_bytes(b"not really")
    (tmp_path / "open.md").write_text("* Something else.")
    told = collect(tmp_path)
    assert "* [One](#one)\n" in told
    assert '<a id="one"></a>\n\n## One\n' in told
    assert "![A](one/a.png) and [b](one/b.json)" in told
    assert "\n# no heading\n" in told
    assert "* Something else." in told
    assert all(f"| {name} |" in told for name in paper.ADDITION | paper.PERPLEXITY)
    assert "no figure of ours for transformer" in told
    two = tmp_path / "two"
    two.mkdir()
    scored = [outcome("transformer", seed, 1.0, 0.9 + 0.02 * seed) for seed in (0, 1)]
    for run in scored:
        run.shares["exact"] = run.shares["token"]
    study = Study("two", "Sums.", "addition-small", {"transformer": []}, "transformer", seeds=2)
    write_study(study, scored, two, [{"commit": "abc"}])
    chosen = tmp_path / "three"
    write_study(replace(study, name="One", scored="validation"), scored[:1], chosen, [{"commit": "abc"}])
    told = write_collection(tmp_path, tmp_path)[0].read_text()
    # The paper's Transformer has 65.8; of a sweep nothing stands beside it.
    assert "| 2 | 100.0 ± 0.0 | 91.0 ± 1.4 | 91.0 ± 1.4 | 91.0 ± 1.4 | - | 91.0 ± 1.4 | +25.2* |" in told
    assert "no figure of ours for transformer" not in told
    assert "\n## One (one)\n" in told
    assert "\n## One (three)\n" in told, "pages of one title are told apart"
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3


def test_arms_that_differ_in_the_size_of_their_state_are_drawn_over_it(tmp_path):
    """And their states are told of; a state is that of the model which was scored."""
    arms = {f"{name}, {width}": [f"model.key_dim={width}"] for name in ("falcon-1", "retnet") for width in (8, 16)}
    study = Study("widths", "", "parity-tiny", arms, next(iter(arms)), seeds=1)
    runs = [replace(outcome(arm, 0, 0.5, 0.25), cost={"state_bytes": 1500 * (1 + i)}) for i, arm in enumerate(arms)]
    _, told, drawn = write_study(study, runs, tmp_path, [])
    assert "| retnet, 8 | 1 | 1,000 | 4.5 | 50.0 |" in told.read_text()
    over_states = drawn.read_bytes()
    runs = [replace(run, cost={}) for run in runs]
    assert over_states != write_study(study, runs, tmp_path, [])[2].read_bytes()
    small = Study("one", "", "parity-tiny", {"falcon-1": ARMS["falcon-1"]}, "falcon-1", SMALL, 1)
    (run,) = run_study(small, tmp_path / "out", workers=1, say=str)
    assert run.cost["state_bytes"] == state_bytes(config_of(small.run("falcon-1", 0)), 5)


def shares(arm, longer, **less):
    """Outcomes with these shares of longer sums right, one for each seed; of other measures so much less."""
    by = {"exact": 0.0, "token": 0.0} | less
    return [
        Outcome(arm, seed, arm, 1000, (1, 2), [2, 3], 80, {name: [1.0, share - off] for name, off in by.items()})
        for seed, share in enumerate(longer)
    ]


def test_how_far_the_runs_go_that_have_learned_what_they_were_trained_on():
    """Beside how far all go, and only where some have and some have not."""
    groups = {"a": shares("a", [0.5, 0.75]), "b": shares("b", [0.1])}
    groups["a"][0].shares["exact"][0] = 0.5
    study = Study("sums", "", "addition-small", {"a": [], "b": [], "c": []}, "b", seeds=2)
    told = page(study, [o for group in groups.values() for o in group], [], "study.png")
    assert f"| longer % | {KNOWING} | against b, by seed |" in told
    assert "| a | 2 | 1,000 | 75.0 ± 35.4 | 62.5 ± 17.7 | 75.0 (1) | +40.0 |" in told
    assert "| b | 1 | 1,000 | 100.0 | 10.0 | 10.0 (1) |  |" in told
    assert "in brackets, how many do" in told
    groups["a"].pop(0)
    assert KNOWING not in page(study, [o for group in groups.values() for o in group], [], "study.png")


def test_claims_are_computed_whatever_they_say():
    """Ahead of both spreads, behind them, or neither; one seed decides nothing."""
    ahead, behind = shares("falcon-3a.3", [0.8, 0.9]), shares("mamba2", [0.1, 0.2])
    close, single = shares("falcon-1a.3", [0.5, 0.66]), shares("retnet", [0.9])
    theirs = shares("transformer", [0.5, 0.6], generated=0.0, generated_token=0.25)
    groups = {run[0].arm: run for run in (theirs, ahead, behind, close, single)}
    study = Study("sums", "", "addition-small", {arm: [] for arm in groups}, "transformer", seeds=2)
    told = "\n".join(sentences([Trained("sums", study, groups)]))
    for name, papers, by in (
        ("falcon-3a.3", "+21.4", "**holds** (+30.0 ± 0.0 points, 2 seeds)"),
        ("mamba2", "+9.4", "**refuted** (-40.0 ± 0.0 points, 2 seeds)"),
        ("falcon-1a.3", "+20.1", "**not decided** (+3.0 ± 3.0 points, 2 seeds)"),
        ("retnet", "+17.1", "**not decided** (+40.0 points, 1 seed)"),
    ):
        line = f"{name} above the Transformer on longer sums, as in the paper ({papers}): "
        line += f"whole sums {by}, their digits {by}."
        assert f"[sums](#sums): {line}" in told
    # One of 80 problems right with either seed, and none: no spread, and not enough problems to tell.
    few, none = shares("a", [1 / 80, 1 / 80]), shares("b", [0.0, 0.0])
    assert verdict(few, none, "exact", longer=True) == "not decided"
    assert verdict(shares("a", [0.1, 0.1]), none, "exact", longer=True) == "holds"
    order = "4 as there, 1 the other way, 5 not decided"
    assert f"pair by pair of 5 models: whole sums {order}; their digits {order}." in told
    assert "digits by -25.0 (transformer)" in told
    assert sentences([Trained("sums", replace(study, scored="validation"), groups)]) == []
    cells = {"next, after": ahead, "same, after": behind}
    square = Study("pairs", "", "addition-small", {arm: [] for arm in cells}, "next, after", seeds=2)
    (told,) = sentences([Trained("pairs", square, cells)])
    by = "**holds** (+70.0 ± 0.0 points, 2 seeds)"
    assert f"falcon-3a.3, read after the write: whole sums {by}, their digits {by}." in told
    gains = {"m, gain < 1": theirs, "m, gain < 2": close}
    capped = Study("gains", "", "s3-tiny", {arm: [] for arm in gains}, "m, gain < 1", seeds=2)
    (told,) = sentences([Trained("gains", capped, gains)])
    assert told.endswith("a gain up to 2 ahead of one up to 1: not decided for m (+3.0 ± 3.0 points, 2 seeds).")


def test_squares_of_several_rules_are_told_of_together():
    study = replace(load_study("pairing-falcon-1"), recipe="parity-tiny", seeds=2)
    shares = {"next, after": 0.9, "next, before": 0.7, "same, after": 0.5, "same, before": 0.5}
    groups = {arm: [outcome(arm, seed, 0.5, share) for seed in (0, 1)] for arm, share in shares.items()}
    told = sentences([Trained("one", study, groups), Trained("two", replace(study, name="two"), groups)])
    assert len(told) == 3
    assert told[-1] == (
        "* [one](#one), [two](#two), over all rules and seeds (4): next-latent against same-step +30.0 ± 0.0 points; "
        "after against before +10.0 ± 0.0 points."
    )
