"""The modes of torch around a call: the meta device, fake tensors, torch.func, torch.load, devices without float64.

A call that has no values to give still gives shapes, at every rule and in backward; a transform gives what autograd
gives, or a ValueError that says what to ask for.
"""

import ast
import io
import re
from pathlib import Path

import pytest
import torch
from conftest import assert_close
from inputs import attend, draw, leaves
from longhand import longhand
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastweight as fw
from fastweight.memory import modes

RULES = sorted(fw.RULES)
SHAPE = {"B": 2, "T": 20, "H": 2, "K": 4, "V": 3}
NAMES = ("q", "k", "v", "beta", "lam")


def given(rule, **changes):
    problem = draw(fw.RULES[rule], **SHAPE, dtype=torch.float32)._asdict()
    return [changes.get(name, problem[name]) for name in NAMES]


@pytest.mark.parametrize("form", ["recurrent", "masked", "chunk"])
@pytest.mark.parametrize("rule", RULES)
def test_without_values_there_are_shapes(rule, form):
    tokens = [t.requires_grad_() for t in given(rule)]
    o, state = fw.fast_weight_attention(*tokens, rule, form=form, output_final_state=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        for without in ([t.detach().to("meta") for t in tokens], [fake.from_tensor(t.detach()) for t in tokens]):
            without = [t.requires_grad_() for t in without]
            got, after = fw.fast_weight_attention(*without, rule, form=form, output_final_state=True)
            assert got.shape == o.shape
            assert [(p.shape, p.dtype) for p in after] == [(p.shape, p.dtype) for p in state]
            (got.sum() + after.S.sum()).backward()
            assert [t.grad.shape for t in without] == [t.shape for t in tokens]


@pytest.mark.parametrize("rule", RULES)
def test_a_layer_and_a_loss_have_shapes_on_the_meta_device(rule):
    with torch.device("meta"):
        config = fw.FastWeightConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mixer=rule, intermediate_size=16
        )
        model, ids = fw.FastWeightForCausalLM(config).train(), torch.zeros(2, 7, dtype=torch.long)
        loss = model(ids, attention_mask=torch.ones(2, 7), labels=ids).loss
    loss.backward()
    assert loss.shape == ()
    assert all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("rule", RULES)
def test_a_transform_of_torch_func_is_right_or_refused(rule):
    problem = draw(fw.RULES[rule], **SHAPE)
    tokens = [getattr(problem, name) for name in NAMES]

    def loss(*each):  # of one sequence
        o, _ = fw.fast_weight_attention(*(t[None] for t in each), rule)
        return o.square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(5))))
    if fw.RULES[rule].objective == "regression" and fw.RULES[rule].window > 1:
        with pytest.raises(ValueError, match=r"rule: got .*torch.func.*expected"):
            per_sample(*tokens)
        return
    inputs = leaves(problem)
    o, _ = attend(fw.RULES[rule])(*(inputs[name] for name in NAMES), None)
    expected = torch.autograd.grad(o.square().sum(), [inputs[name] for name in NAMES])
    for name, gradient, wanted in zip(NAMES, per_sample(*tokens), expected, strict=True):
        assert_close(gradient, wanted, torch.float64, "gradient", name)


@pytest.mark.parametrize("asked", [{"form": "chunk"}, {"backend": "triton"}])
def test_what_a_transform_cannot_see_through_is_refused(asked):
    with pytest.raises(ValueError, match=r"form: got .*torch.func.*expected 'recurrent'"):
        torch.func.vmap(lambda *t: fw.fast_weight_attention(*t, "falcon-1", **asked)[0])(
            *(t[None] for t in given("falcon-1"))
        )


def test_a_state_saved_by_torch_save_loads_with_the_usual_safety():
    file = io.BytesIO()
    _, state = fw.fast_weight_attention(*given("falcon-3"), "falcon-3", output_final_state=True)
    layer = fw.FastWeightAttention(16, 2, rule="falcon-3")
    _, layer_state = layer(torch.randn(1, 5, 16), output_state=True)
    torch.save((state, layer_state), file)
    file.seek(0)
    again, layer_again = torch.load(file, weights_only=True)
    assert isinstance(again, fw.State)
    assert all(torch.equal(a, b) for a, b in zip(again, state, strict=True))
    assert torch.equal(layer_again.memory.S, layer_state.memory.S)


def test_a_layer_is_differentiated_twice_and_per_sample():
    torch.manual_seed(0)
    layer = fw.FastWeightAttention(8, 2, rule="falcon-1", form="recurrent").double()
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weights = dict(layer.named_parameters())

    def loss(weights, row):
        return torch.func.functional_call(layer, weights, (row[None],))[0].square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x.detach())
    for row in range(3):
        expected = torch.autograd.grad(loss(weights, x[row]), list(weights.values()))
        for (name, gradient), wanted in zip(per_sample.items(), expected, strict=True):
            assert_close(gradient[row], wanted, torch.float64, "gradient", name)
    assert torch.autograd.gradgradcheck(lambda x: layer(x[:1])[0], (x,))


class WithoutDouble(TorchDispatchMode):
    """A device on which nothing can be float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in torch.utils._pytree.tree_leaves(result):
            assert not (isinstance(part, torch.Tensor) and part.dtype == torch.float64), f"{func} made float64"
        return result


@pytest.mark.parametrize("form", ["recurrent", "masked", "chunk"])
@pytest.mark.parametrize("rule", RULES)
def test_a_device_without_float64_computes_in_float32(rule, form, monkeypatch):
    monkeypatch.setattr(modes, "WITHOUT_DOUBLE", ("cpu",))
    tokens = [t.requires_grad_() for t in given(rule)]
    with WithoutDouble():
        o, state = fw.fast_weight_attention(*tokens, rule, form=form, output_final_state=True)
        gradients = torch.autograd.grad(o.square().sum() + state.S.square().sum(), tokens)
    doubles = [t.detach().double().requires_grad_() for t in tokens]
    expected = longhand(*doubles, fw.RULES[rule])
    wanted = torch.autograd.grad(expected.o.square().sum() + expected.S.square().sum(), doubles)
    assert_close(o, expected.o, torch.float32)
    assert_close(state.S, expected.S, torch.float32, "state")
    for name, gradient, other in zip(NAMES, gradients, wanted, strict=True):
        assert_close(gradient, other, torch.float32, "gradient", name)


def test_forwards_that_write_in_place_hand_out_what_is_new(monkeypatch):
    """torch 2.11 compiles a zero gradient otherwise; the op's own kernels are operators of their own and not traced."""
    found = []
    for file in sorted(Path(fw.__file__).parent.glob("*/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and any("Function" in ast.unparse(base) for base in node.bases):
                forward = next(item for item in node.body if getattr(item, "name", "") == "forward")
                text = ast.unparse(forward)
                # A method with a trailing underscore, an output argument, or views that helpers write to.
                if re.search(r"\.[a-z]+_\(|out=|flat\(part", text):
                    returned = [ast.unparse(item) for item in ast.walk(forward) if isinstance(item, ast.Return)]
                    assert all("as_new(" in line for line in returned), f"{file.name}: {node.name}: {returned}"
                    found.append(node.name)
    assert {"_Taps", "Solve", "Additive", "Sliding", "ColumnLocal", "ColumnScan"} <= set(found)
    written = torch.zeros(2)
    assert modes.as_new(written) is written
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert modes.as_new(written) is not written
