"""The product of many adapters at once: values and gradients equal autograd's through the plain formula in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tunerack.engine import products
from tunerack.engine.linear import AdaptableLinear, Projection, TrainedLinear, Update, UpdatePart
from tunerack.engine.training.dropout import keep_mask

COLUMNS = {1: ((0, 40),), 2: ((0, 24), (24, 48)), 3: ((0, 40), (40, 52), (52, 64))}
IN, ROWS = 48, 60
# Rows [begin, end) of each job; rows 45..60 have no adapter.
JOBS = ((0, 17), (17, 30), (30, 45))


@pytest.fixture(params=["torch", "onednn"])
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    before = products.library()
    products.use_library(request.param)
    yield request.param
    products.use_library(before)


class Case:
    """Three jobs of other ranks and scales on one group; masks as training draws them."""

    def __init__(self, parts: int, ranks: tuple[int, ...], p: float, mask_seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        columns = COLUMNS[parts]
        self.out = columns[-1][1]
        self.weight, self.bias = draw(self.out, IN), draw(self.out)
        self.x = draw(ROWS, IN).requires_grad_(True)
        self.mixing = draw(ROWS, self.out)
        self.updates: list[Update] = []
        self.parameters: list[Tensor] = []
        for job, ((begin, end), rank) in enumerate(zip(JOBS, ranks, strict=True)):
            a = draw(rank * parts, IN).requires_grad_(True)
            bs = [draw(c_end - c_begin, rank).requires_grad_(True) for c_begin, c_end in columns]
            masks = tuple(
                keep_mask(seed=mask_seed + job, step=2, row=3, layer=i, shape=(end - begin, IN), p=p)
                for i in range(parts)
            )
            scales = [(0.7 + job + i / 4) / (1 - p) for i in range(parts)]
            placed = tuple(
                UpdatePart(c_begin, c_end, i * rank, (i + 1) * rank, scales[i], bs[i])
                for i, (c_begin, c_end) in enumerate(columns)
            )
            self.updates.append(Update(begin, end, a, placed, masks if p else None))
            self.parameters += [a, *bs]

    def ours(self) -> list[Tensor]:
        out = TrainedLinear.apply(self.x, self.weight, self.bias, tuple(self.updates), *self.parameters)
        return [out.detach(), *torch.autograd.grad((out * self.mixing).sum(), [self.x, *self.parameters])]

    def plain(self) -> list[Tensor]:
        """y = x·Wᵀ + b, and for each job's rows and part + s·((M∘x)·Aᵀ)·Bᵀ, differentiated by autograd in float64."""
        x = self.x.detach().double().requires_grad_(True)
        copies = [p.detach().double().requires_grad_(True) for p in self.parameters]
        y = x @ self.weight.double().T + self.bias.double()
        left = iter(copies)
        for update in self.updates:
            rows, a = x[update.begin : update.end], next(left)
            for i, part in enumerate(update.parts):
                kept = rows if update.masks is None else rows * update.masks[i].double()
                delta = part.scale * (kept @ a[part.rank_begin : part.rank_end].T) @ next(left).T
                wide = torch.nn.functional.pad(
                    delta, (part.begin, self.out - part.end, update.begin, ROWS - update.end)
                )
                y = y + wide
        return [y.detach(), *torch.autograd.grad((y * self.mixing.double()).sum(), [x, *copies])]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("ranks", [(4, 8, 16), (16, 64, 4), (64, 64, 32)])
def test_values_and_gradients_equal_autograds_with_the_same_mask(library, parts, ranks, p):
    case = Case(parts, ranks, p)
    for mine, reference in zip(case.ours(), case.plain(), strict=True):
        scale = float(reference.abs().max())
        assert float((mine.double() - reference).abs().max()) < 1e-5 * scale


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_another_mask_is_seen(library, p):
    """Were the backward pass to draw another mask, or none, every gradient of A and the input's would be far off."""
    case = Case(2, (4, 16, 64), p)
    ours = case.ours()
    for wrong in (Case(2, (4, 16, 64), p, mask_seed=50), Case(2, (4, 16, 64), p)):
        if wrong.updates[0].masks is not None and torch.equal(wrong.updates[0].masks[0], case.updates[0].masks[0]):
            wrong.updates = [Update(u.begin, u.end, u.a, u.parts, None) for u in wrong.updates]
        for mine, reference in zip(ours[1:], wrong.plain()[1:], strict=True):
            if reference.shape in ((ROWS, IN), *((u.a.shape) for u in case.updates)):
                assert float((mine.double() - reference).abs().max()) > 1e-2 * float(reference.abs().max())


def test_rows_of_one_job_do_not_reach_another(library):
    """Changing one job's adapter changes its own rows alone."""
    case = Case(3, (4, 8, 16), 0.1)
    before = case.ours()[0]
    with torch.no_grad():
        case.updates[1].a.mul_(3.0)
    changed = (case.ours()[0] != before).any(1).nonzero()[:, 0].tolist()
    assert changed == list(range(*JOBS[1]))


def test_a_group_that_no_job_adapts_is_differentiable(library):
    group = AdaptableLinear(0, [Projection("p", 0, 40)], torch.randn(40, IN), torch.randn(40))
    x = torch.randn(5, IN, requires_grad=True)
    mixing = torch.randn(5, 40)
    (grad,) = torch.autograd.grad((group.base(x) * mixing).sum(), [x])
    torch.testing.assert_close(grad, mixing @ group.weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(group.base(x).detach(), x @ group.weight.T + group.bias, rtol=1e-5, atol=1e-5)
