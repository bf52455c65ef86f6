"""Steps as CUDA graphs: refused where they cannot be, and to the bit what a step is without one."""

import pytest
import torch
from test_training import TINY, killed_run, losses, parameters, quiet

from fastweight.recipes import Run
from fastweight.recipes.loader import build_run
from fastweight.training import train
from fastweight.training.graphs import RecordedStep, check_recordable

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
LONGER = {"device": "auto", "steps": 12, "checkpoint_every": 4, "validate_every": 5}


def recorded(**changes: dict) -> Run:
    """The tiny run with sections changed, its steps as graphs unless they are changed too."""
    changed = {"engine": {"graphs": True}, "training": {"device": "auto"}} | changes
    return build_run(TINY | {name: TINY.get(name, {}) | values for name, values in changed.items()})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": {"device": "cpu"}}, "without a GPU"),
        ({"engine": {"gradient_checkpointing": True, "graphs": True}}, "gradient_checkpointing"),
        ({"task": {"layout": "single"}}, "'single'"),
    ],
)
def test_what_cannot_be_recorded(changes, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_recordable(recorded(), 1)
    with pytest.raises(ValueError, match=words):
        check_recordable(recorded(**changes), 1)
    with pytest.raises(ValueError, match="2 processes"):
        check_recordable(recorded(), 2)


def test_refused_on_a_cpu(tmp_path):
    with pytest.raises(ValueError, match="got True without a GPU"):
        train(recorded(), tmp_path / "run", console=quiet())


@pytest.mark.gpu
class TestOnADevice:
    @pytest.mark.parametrize("mixer", ["falcon-3a", "falcon-3", "gated-deltanet", "mamba2", "transformer"])
    @pytest.mark.parametrize("changes", [{}, {"micro_batch_size": 4}, {"precision": "bf16"}], ids=str)
    def test_the_same_to_the_bit(self, mixer, changes, tmp_path):
        ends = []
        for graphs in (False, True):
            model = TINY["model"] | SMALL | {"mixer": mixer}
            run = recorded(model=model, training=LONGER | changes, engine={"graphs": graphs})
            train(run, tmp_path / str(graphs), console=quiet())
            ends.append((losses(tmp_path / str(graphs)), parameters(tmp_path / str(graphs) / "checkpoint-12")))
        (plain, expected), (with_graphs, got) = ends
        assert len(set(plain)) == len(plain)
        assert with_graphs == plain
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0, msg=name)

    def test_goes_on_after_a_kill(self, tmp_path, monkeypatch):
        run = recorded(model=SMALL, training=LONGER)
        train(run, tmp_path / "whole", console=quiet())
        killed_run(run, tmp_path / "cut", 9, monkeypatch)
        train(run, tmp_path / "cut", console=quiet())
        expected = parameters(tmp_path / "whole" / "checkpoint-12")
        for name, value in parameters(tmp_path / "cut" / "checkpoint-12").items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)

    def test_other_shapes_raise(self):
        weight, idle = (torch.nn.Parameter(torch.ones(3, device="cuda")) for _ in range(2))
        step = RecordedStep([weight, idle])

        def loss(inputs, count):
            result = (inputs["x"] * weight).sum() / count
            result.backward()
            return result.detach()

        for call in range(1, 7):
            weight.grad = None
            assert float(step({"x": torch.full((3,), float(call), device="cuda")}, 2, loss)) == 1.5 * call
            assert weight.grad.tolist() == [call / 2] * 3
            assert idle.grad is None
        step({"x": torch.ones(3, device="cuda")}, 2, loss)
        assert weight.grad.tolist() == [3.5] * 3  # added to those of call 6
        with pytest.raises(ValueError, match="shapes"):
            step({"x": torch.ones(1, device="cuda")}, 2, loss)
        weight.grad = torch.zeros(3, device="cuda")
        with pytest.raises(ValueError, match="gradients"):
            step({"x": torch.ones(3, device="cuda")}, 2, loss)
