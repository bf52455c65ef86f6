"""The short convolution against a loop: masks, packed documents, caches, its start."""

import pytest
import torch
from modules import check_all, convolution_longhand, grads, random, seeded

from fastweight.layers.convolution import ShortConvolution


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
