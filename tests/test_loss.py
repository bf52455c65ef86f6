"""The chunked loss: equal to plain cross-entropy with its gradients, whatever the chunks; never all logits at once."""

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from fastweight.models import FastWeightConfig, FastWeightForCausalLM
from fastweight.models.loss import causal_loss, linear_cross_entropy

N, D, V = 37, 8, 53


def inputs(dtype: torch.dtype, ignored: str = "some"):
    """hidden, weight and labels; `ignored` labels: "none", "some" or "all"."""
    random = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(N, D, generator=random, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(V, (N,), generator=random)
    some = torch.rand(N, generator=random) < {"none": 0.0, "some": 0.4, "all": 1.1}[ignored]
    return hidden, weight, labels.masked_fill(some, -100)


def plain(hidden, weight, labels):
    """The same sum in float64, through all logits."""
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    loss = F.cross_entropy(wide[0] @ wide[1].T, labels, reduction="sum", ignore_index=-100)
    return loss, torch.autograd.grad(loss, wide)


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("chunk_size", [1, 5, N - 1, N, 1000, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_equals_plain_cross_entropy(dtype, chunk_size, ignored, assert_close) -> None:
    hidden, weight, labels = inputs(dtype, ignored)
    before = [t.clone() for t in (hidden, weight, labels)]
    loss = linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)
    grads = torch.autograd.grad(loss, (hidden, weight))
    expected, expected_grads = plain(hidden, weight, labels)
    assert_close(loss, expected, dtype, "state", "loss")
    for name, got, wanted in zip(("hidden", "weight"), grads, expected_grads, strict=True):
        assert got.dtype == dtype
        assert_close(got, wanted, dtype, "gradient", name)
    for now, then in zip((hidden, weight, labels), before, strict=True):
        assert torch.equal(now, then)  # nothing is changed in place


def test_half_precision_rounds_only_the_products(assert_close) -> None:
    """Against the same rounding of logits in float64: what remains are the products of the gradients."""
    hidden, weight, labels = inputs(torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_size=5)
    assert loss.dtype == torch.float32
    logits = (hidden @ weight.T).detach().double().requires_grad_()
    expected = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    assert_close(loss, expected, torch.bfloat16, "state", "loss")
    (d_logits,) = torch.autograd.grad(expected, logits)
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    d_logits = d_logits.to(torch.bfloat16).double()
    assert_close(d_hidden, d_logits @ weight.double(), torch.bfloat16, "gradient", "hidden")
    assert_close(d_weight, d_logits.T @ hidden.double(), torch.bfloat16, "gradient", "weight")


def test_autocast_leaves_the_gradient_of_the_matrix_in_float32(assert_close) -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_size=7)
    d_weight = torch.autograd.grad(loss, weight)[0]
    assert d_weight.dtype == torch.float32
    narrow = [t.detach().bfloat16() for t in (hidden, weight)]
    d_logits = torch.softmax((narrow[0] @ narrow[1].T).double(), -1)
    d_logits[torch.arange(N), labels.clamp(min=0)] -= 1
    d_logits = d_logits.masked_fill((labels == -100)[:, None], 0).bfloat16().double()
    assert_close(d_weight, d_logits.T @ narrow[0].double(), torch.float32, "gradient", "weight")


@pytest.mark.parametrize(("with_hidden", "with_weight"), [(True, False), (False, True), (False, False)])
def test_only_wanted_gradients_are_made(with_hidden: bool, with_weight: bool, assert_close) -> None:
    hidden, weight, labels = inputs(torch.float32)
    hidden, weight = hidden.detach().requires_grad_(with_hidden), weight.detach().requires_grad_(with_weight)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_size=5)
    expected, (d_hidden, d_weight) = plain(hidden, weight, labels)
    assert_close(loss, expected, torch.float32, "state")
    assert loss.requires_grad == (with_hidden or with_weight)
    if loss.requires_grad:
        (3 * loss).backward()
    for tensor, gradient in ((hidden, d_hidden), (weight, d_weight)):
        assert (tensor.grad is None) == (not tensor.requires_grad)
        if tensor.requires_grad:
            assert_close(tensor.grad, 3 * gradient, torch.float32, "gradient")


def test_no_more_than_one_chunk_of_logits_exists() -> None:
    """Not one tensor as large as all logits is made, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    hidden = torch.randn(400, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    with Watch():
        linear_cross_entropy(hidden, weight, torch.zeros(400, dtype=torch.long), chunk_size=10).backward()
    assert largest <= max(10 * V, hidden.numel(), weight.numel())


def test_wrong_arguments_are_named() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with pytest.raises(ValueError, match="hidden, weight: got shapes"):
        linear_cross_entropy(hidden, weight[:, 1:], labels)
    with pytest.raises(ValueError, match="labels: got shape"):
        linear_cross_entropy(hidden, weight, labels[1:])
    with pytest.raises(ValueError, match="chunk_size: got 0"):
        linear_cross_entropy(hidden, weight, labels, chunk_size=0)
    for wrong in (V, -1):
        with pytest.raises(ValueError, match="labels: got"):
            linear_cross_entropy(hidden, weight, labels.masked_fill(labels == labels[0], wrong))
    with pytest.raises(ValueError, match="fused_loss: got 'liger'"):
        causal_loss(hidden[None], weight, labels[None], how="liger")
    loss = linear_cross_entropy(hidden, weight, labels)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


# In the model


def small(**settings) -> FastWeightForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return FastWeightForCausalLM(FastWeightConfig(vocab_size=V, initializer_range=0.2, **sizes, **settings))


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": False}, {"mixer": "transformer"}], ids=str)
@pytest.mark.parametrize("items", [None, 11, torch.tensor(11)], ids=str)
def test_training_gives_the_loss_and_gradients_of_full_logits(settings, items, assert_close) -> None:
    model = small(**settings).train()
    full = copy.deepcopy(model)
    ids = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.arange(9) % 4 == 3, -100)
    ours = model(input_ids=ids, labels=labels, num_items_in_batch=items)
    theirs = full(input_ids=ids, labels=labels, num_items_in_batch=items, output_logits=True)
    assert ours.logits is None
    assert theirs.logits.shape == (2, 9, V)
    assert_close(ours.loss, theirs.loss, torch.float32, "state")
    ours.loss.backward()
    theirs.loss.backward()
    for (name, a), b in zip(model.named_parameters(), full.parameters(), strict=True):
        assert_close(a.grad, b.grad, torch.float32, "gradient", name)


def test_packed_documents_do_not_predict_each_other(assert_close) -> None:
    model = small().train()
    ids = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    losses = [model(input_ids=ids, labels=ids, cu_seqlens=bounds, output_logits=how).loss for how in (False, True)]
    assert_close(losses[0], losses[1], torch.float32, "state")
    apart = [model(input_ids=part, labels=part, num_items_in_batch=10).loss for part in (ids[:, :5], ids[:, 5:])]
    assert_close(losses[0], sum(apart), torch.float32, "forward")


def test_logits_are_there_when_they_are_wanted() -> None:
    model, ids = small(), torch.arange(6)[None]
    assert model.train()(input_ids=ids).logits.shape == (1, 6, V)
    assert model(input_ids=ids, labels=ids).logits is None
    assert len(model(input_ids=ids, labels=ids, return_dict=False)) == 1  # the loss alone
    assert model.eval()(input_ids=ids, labels=ids).logits.shape == (1, 6, V)
    assert model(input_ids=ids, labels=ids, output_logits=False).logits is None
    with pytest.raises(ValueError, match="output_logits: got False without labels"):
        model(input_ids=ids, output_logits=False)
    with pytest.raises(ValueError, match="fused_loss: got 'fast'"):
        FastWeightConfig(fused_loss="fast")


def test_a_resized_vocabulary_still_makes_no_logits(assert_close) -> None:
    model = small().train()
    model.resize_token_embeddings(V + 11, mean_resizing=False)
    ids = torch.arange(6)[None]
    output = model(input_ids=ids, labels=ids)
    assert output.logits is None
    assert_close(output.loss, model(input_ids=ids, labels=ids, output_logits=True).loss, torch.float32, "state")


class Louder(torch.nn.Linear):
    """Stands for what adapters and quantisation put in the place of the output matrix."""

    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("change", ["hook", "subclass", "loss", "none"])
def test_a_changed_output_matrix_or_loss_is_not_bypassed(change: str) -> None:
    ids, seen = torch.arange(6)[None], []
    model = small(fused_loss="none" if change == "none" else "chunked").train()
    plain = model(input_ids=ids, labels=ids, output_logits=True).loss
    if change == "hook":
        model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    elif change == "subclass":
        model.lm_head.__class__ = Louder
    elif change == "loss":
        model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    else:
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    loss = model(input_ids=ids, labels=ids).loss
    assert (loss != plain) == (change != "none")
    assert seen == ([(1, 6, V)] if change == "none" else [])


def test_a_compiler_keeps_it_whole(assert_close) -> None:
    hidden, weight, labels = inputs(torch.float32)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(hidden, weight, labels, chunk_size=5)
    grads = torch.autograd.grad(loss, (hidden, weight))
    expected, expected_grads = plain(hidden, weight, labels)
    assert_close(loss, expected, torch.float32, "state")
    for got, wanted in zip(grads, expected_grads, strict=True):
        assert_close(got, wanted, torch.float32, "gradient")


INTERPRETED = """
import torch
import torch.nn.functional as F
from fastweight.kernels.cross_entropy import cross_entropy_rows

for dtype, allowed in ((torch.float32, 2e-6), (torch.bfloat16, 2**-8)):
    for vocab, width in ((5, 5), (5, 64), (4096, 4096), (5003, 5056)):
        random = torch.Generator().manual_seed(0)
        logits = torch.full((6, width), float("nan"), dtype=dtype)  # nobody looks at the padding
        logits[:, :vocab] = (3 * torch.randn(6, vocab, generator=random)).to(dtype)
        labels = torch.randint(vocab, (6,), generator=random)
        labels[2] = -100
        exact = logits[:, :vocab].double().requires_grad_()
        losses = F.cross_entropy(exact, labels, reduction="none", ignore_index=-100)
        losses.sum().backward()
        kept = logits.clone()
        read = cross_entropy_rows(logits, labels, vocab, -100, False)
        assert torch.equal(logits.nan_to_num(7), kept.nan_to_num(7)), "only asked for losses"
        written = cross_entropy_rows(logits, labels, vocab, -100, True)
        assert torch.equal(read, written)
        assert (written.double() - losses.detach()).abs().max() < 2e-6 * losses.max()
        assert (logits[:, :vocab].double() - exact.grad).abs().max() <= allowed
        assert not logits[:, vocab:].any()
        unknown = cross_entropy_rows(kept, torch.full((6,), vocab), vocab, -100, False)
        assert unknown.isnan().all()
print("compared")
"""


def test_the_kernel_of_a_gpu_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", INTERPRETED]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert "compared" in ended.stdout, ended.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [50_257, 64, 5])
def test_on_a_gpu_it_equals_plain_cross_entropy(dtype, vocab, assert_close) -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=random).cuda().to(dtype).requires_grad_()
    weight = (torch.randn(vocab, 64, generator=random) / 4).cuda().to(dtype).requires_grad_()
    labels = torch.randint(vocab, (300,), generator=random).masked_fill(torch.arange(300) % 3 == 0, -100).cuda()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_size=64)
    grads = torch.autograd.grad(loss, (hidden, weight))
    expected, expected_grads = plain(hidden, weight, labels)
    assert_close(loss, expected, torch.bfloat16, "forward")
    for got, wanted in zip(grads, expected_grads, strict=True):
        assert float((got.double() - wanted).norm() / wanted.norm()) < (1e-2 if dtype == torch.bfloat16 else 1e-3)
    unknown = linear_cross_entropy(hidden, weight, labels.masked_fill(labels == labels[1], vocab))
    assert torch.isnan(unknown)
