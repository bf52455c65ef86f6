"""The short convolution against a loop: masks, packed documents, caches, its start; and its GPU kernel."""

import pytest
import torch
import torch.nn.functional as F
from modules import check_all, convolution_longhand, grads, random, seeded

from fastweight.layers.convolution import ShortConvolution
from tests.interpreter import INTERPRETED, run_interpreted
from tests.kernel_harness import gpu, interpreted


class TestShortConvolution:
    @pytest.mark.parametrize("width", [1, 2, 4])
    @pytest.mark.parametrize("bounds", [None, [0, 3, 3, 4, 9], [0, 9]])
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("cached", [False, True])
    def test_equals_the_loop(self, width, bounds, masked, cached):
        batch = 3 if bounds is None else 1
        conv = seeded(ShortConvolution(2, width))
        x = random(batch, 9, 2).requires_grad_()
        mask = random(batch, 9, seed=3) > 0 if masked else None
        rows = batch if bounds is None else len(bounds) - 1
        cache = random(rows, width - 1, 2, seed=4).requires_grad_() if cached else None
        cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
        y, new = conv(x, mask, cu_seqlens, cache)
        if masked:
            y = y * mask[..., None]
        expected = convolution_longhand(x, conv.weight, mask, bounds, cache)
        check_all([y, new], expected, "output and cache")
        sources = [x, conv.weight] + ([cache] if cached else [])
        check_all(grads([y, new], sources), grads(expected, sources), "gradient", "gradient")

    @pytest.mark.parametrize("bounds", [None, [0, 0]])
    def test_no_tokens_keep_the_cache(self, bounds):
        conv, cache = seeded(ShortConvolution(2, 4)), random(1, 3, 2)
        y, new = conv(random(1, 0, 2), None, None if bounds is None else torch.tensor(bounds), cache)
        assert y.shape == (1, 0, 2)
        assert (new == cache).all()

    def test_a_row_without_real_tokens_keeps_its_cache(self):
        conv, cache = seeded(ShortConvolution(2, 4)), random(1, 3, 2)
        _, new = conv(random(1, 5, 2), torch.zeros(1, 5, dtype=torch.bool), None, cache)
        assert (new == cache).all()

    def test_taps_that_start_as_a_copy_pass_each_token_nearly_as_it_is(self):
        conv, x = ShortConvolution(64, 4, start="copy"), random(1, 50, 64).float()
        assert 0 < (conv(x)[0] - x).std() < 0.1
        assert conv.drawn_taps().std() < 0.5

    def test_a_cache_of_another_shape_is_refused(self):
        with pytest.raises(ValueError, match=r"cache: got shape \(1, 2, 2\), expected \[N, 3, 2\]"):
            ShortConvolution(2, 4)(torch.zeros(1, 5, 2), cache=torch.zeros(1, 2, 2))

    def test_names_are_checked(self):
        with pytest.raises(ValueError, match="conv_activation: got 'relu'"):
            ShortConvolution(2, 4, activation="relu")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="conv_start: got 'copied'"):
            ShortConvolution(2, 4, start="copied")  # type: ignore[arg-type]

    def test_a_silu_comes_last(self):
        conv, x = seeded(ShortConvolution(3, 4, bias=True, activation="silu")), random(2, 5, 3)
        y, _ = conv(x)
        conv.activation = "none"
        torch.testing.assert_close(y, F.silu(conv(x)[0]))


SHAPES = [  # N, T, D, W, parts: fewer tokens than taps, one stretch and several, channels that fill no tile
    (2, 9, 5, 4, (5,)),
    (1, 1, 130, 4, (128, 2)),
    (2, 2, 3, 3, (1, 2)),
    (3, 33, 7, 2, (2, 2, 3)),
    (1, 300, 4, 4, (1, 1, 1, 1)),
    (1, 130, 2, 1, (2,)),
    (2, 5, 260, 4, (128, 128, 4)),
]
WIDE = [
    (3, 700, 384, 4, (128, 128, 128)),
    (2, 1024, 2304, 4, (768, 768, 768)),
    (1, 300, 1536, 4, (128, 128, 1280)),
    (256, 28, 768, 4, (256, 256, 256)),
    (1, 1, 768, 4, (256, 512)),
    (2, 257, 200, 3, (64, 64, 72)),
]


def check_kernel(shape, dtype, device, silu, bias, want_cache, assert_close):
    """Values and gradients against float64, from the same rounded inputs."""
    from fastweight.kernels.convolution import short_convolution

    N, T, D, W, sizes = shape
    shapes = [(N, W - 1, D), (N, T, D), (D, W), *([(D,)] if bias else [])]
    given = [random(*size, seed=i).to(dtype) for i, size in enumerate(shapes)]
    given[2] = given[2].float()  # parameters stay wide
    exact = [tensor.double().requires_grad_(i > 0 or want_cache) for i, tensor in enumerate(given)]
    given = [tensor.to(device).requires_grad_(i > 0 or want_cache) for i, tensor in enumerate(given)]
    window = torch.cat(exact[:2], dim=1)
    expected = sum(window[:, j : j + T] * exact[2][:, j] for j in range(W)) + (exact[3] if bias else 0)
    expected = F.silu(expected) if silu else expected
    parts = short_convolution(*given[:3], given[3] if bias else None, silu, sizes)
    assert all(part.is_contiguous() and part.dtype == dtype for part in parts)
    y = torch.cat(parts, dim=-1)
    assert_close(y, expected, dtype)
    dy = random(N, T, D, seed=9).to(dtype)
    sources = [i for i, tensor in enumerate(given) if tensor.requires_grad]
    got = torch.autograd.grad(y, [given[i] for i in sources], dy.to(device))
    wanted = torch.autograd.grad(expected, [exact[i] for i in sources], dy.double())
    for i, mine, theirs in zip(sources, got, wanted, strict=True):
        name = ("cache", "x", "weight", "bias")[i]
        assert mine.dtype == given[i].dtype
        assert_close(mine, theirs, given[i].dtype, "gradient", name)


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("silu", "bias", "want_cache"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_interpreted_kernel(shape, silu, bias, want_cache, assert_close):
    check_kernel(shape, torch.float32, "cpu", silu, bias, want_cache, assert_close)


def test_kernel_in_the_interpreter():
    assert f"{3 * len(SHAPES)} passed" in run_interpreted(__file__, "interpreted_kernel", timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no machine code")
def test_machine_code_moves_eight_bytes_at_a_time_and_spills_nothing(monkeypatch):
    """Of widths and parts that kernels can take apart: what reads x and what writes y and dx, for Hopper."""
    pytest.importorskip("triton")
    from fastweight.kernels import convolution
    from tests.compiled import Compiler
    from tests.machine_code import disassemble

    compiler = Compiler()
    monkeypatch.setattr(convolution, "start", compiler.start)
    cache, x, weight = torch.zeros(2, 3, 768).bfloat16(), torch.zeros(2, 300, 768).bfloat16(), torch.zeros(768, 4)
    parts = convolution._forward(cache, x, weight, None, True, [256, 256, 256])
    convolution._backward(parts, cache, x, weight, None, True, False)
    assert set(compiler.made) == {"convolution._values", "convolution._gradients"}
    for name, made in compiler.made.items():
        sass = disassemble(made.asm["cubin"])
        assert "STL" not in sass, f"{name} spills"
        assert sass.count("STG.E.64") >= 4, name  # four tokens of four channels a turn, in bfloat16
        assert sass.count("LDG.E.64") >= (4 if name.endswith("_values") else 8), name


class TestOnADevice:
    pytestmark = gpu

    @pytest.mark.parametrize("shape", [*SHAPES, *WIDE], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("silu", "bias"), [(True, False), (True, True), (False, False)])
    def test_kernel(self, shape, dtype, silu, bias, assert_close):
        check_kernel(shape, dtype, "cuda", silu, bias, bias, assert_close)

    @pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")  # when a compiler is loaded
    @pytest.mark.parametrize("bounds", [None, [0, 3, 3, 130, 200]])
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_layer_uses_it(self, bounds, masked, compiled, assert_close, monkeypatch):
        """Masks and documents, beside plain PyTorch in float64; compiled too."""
        from fastweight.kernels import convolution

        calls = []
        for name in ("_forward", "_backward"):
            kept = getattr(convolution, name)
            monkeypatch.setattr(convolution, name, lambda *given, kept=kept: calls.append(1) or kept(*given))
        exact = seeded(ShortConvolution(64, 4, activation="silu", backend="torch"))
        conv = seeded(ShortConvolution(64, 4, activation="silu")).to("cuda", torch.float32)
        x = random(2 if bounds is None else 1, 200, 64)
        mask = random(*x.shape[:2], seed=3) > 0 if masked else None
        cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
        mine = x.float().cuda().requires_grad_()
        call = torch.compile(conv) if compiled else conv
        around = [None if tensor is None else tensor.cuda() for tensor in (mask, cu_seqlens)]
        y, new = call(mine, *around)
        theirs = x.clone().requires_grad_()
        expected, last = exact(theirs, mask, cu_seqlens)
        weights = random(*x.shape, seed=5) * (1 if mask is None else mask[..., None])
        assert_close(y * weights.float().cuda(), expected * weights, torch.float32)
        assert_close(new, last, torch.float32)
        (y * weights.float().cuda()).sum().backward()
        (expected * weights).sum().backward()
        assert_close(mine.grad, theirs.grad, torch.float32, "gradient")
        assert_close(conv.weight.grad, exact.weight.grad, torch.float32, "gradient")
        assert compiled or len(calls) == 2
