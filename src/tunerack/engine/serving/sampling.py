"""From logits to a token, by the request's own rules and its own random stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_CANDIDATES = 512
_COLDEST = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; temperature 0 takes the likeliest.

    Order: logit_bias and penalties, temperature, then top_k, top_p (Holtzman et al., arXiv 1904.09751) and min_p
    (arXiv 2407.01082), each over what the one before left.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    @property
    def plain_greedy(self) -> bool:
        """Whether the row's highest logit is the answer as it stands."""
        penalised = self.presence_penalty or self.frequency_penalty or self.logit_bias
        return self.temperature == 0 and not penalised


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of the chosen token, and of the likeliest ones, before temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def choose_token(logits: Tensor, params: SamplingParams, position: int, generated: Counter[int]) -> int:
    """The token at `position` (0 is the first generated one); logits [vocab] fp32.

    The random draw depends on (seed, position) alone, so neither neighbours in the batch nor a restart change it.
    """
    if params.logit_bias or params.presence_penalty or params.frequency_penalty:
        logits = logits.clone()
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        for token, count in generated.items():
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature == 0:
        return int(logits.argmax())
    # From the highest down: next to 0, a temperature leaves that one alone and makes no infinities.
    scaled = (logits - logits.max()) / max(params.temperature, _COLDEST)
    log_total = float(scaled.logsumexp(0))
    values, tokens = _candidates(scaled, params, log_total)
    probabilities = (values - log_total).double().exp_()
    if params.top_k:
        probabilities /= probabilities.sum()
    if params.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        kept = max(1, int((before < params.top_p).sum()))
        probabilities, tokens = probabilities[:kept], tokens[:kept]
    if params.min_p > 0:
        likely = probabilities >= params.min_p * probabilities.max()
        probabilities, tokens = probabilities[likely], tokens[likely]
    # By token, not by score: the batch may change a score's last bits, and so which of two near ones comes first.
    tokens, order = tokens.sort()
    cumulative = probabilities[order].cumsum(0)
    # As uint64: of a list with a seed past 2**63 numpy would make floats.
    key = np.array([params.seed, position], dtype=np.uint64)
    draw = np.random.Generator(np.random.Philox(key=key)).random()
    place = int(torch.searchsorted(cumulative, draw * float(cumulative[-1]), right=True))
    return int(tokens[min(place, len(tokens) - 1)])


def _candidates(scaled: Tensor, params: SamplingParams, log_total: float) -> tuple[Tensor, Tensor]:
    """Scores and tokens, all that the rules can leave; in falling order where top_k or top_p ask for it."""
    if params.top_k:
        values, tokens = scaled.topk(min(params.top_k, len(scaled)))
        return values, tokens
    if params.top_p < 1:
        values, tokens = scaled.topk(min(_CANDIDATES, len(scaled)))
        if float((values - log_total).exp().sum()) >= params.top_p:
            return values, tokens
        values, tokens = scaled.sort(descending=True)
        return values, tokens
    return scaled, torch.arange(len(scaled), device=scaled.device)


def token_logprob(logits: Tensor, token: int, count: int) -> TokenLogprob:
    """Log-probabilities of one row of logits [vocab]."""
    log_total = logits.logsumexp(0)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        values, tokens = logits.topk(count)
        top = tuple(zip(tokens.tolist(), (values - log_total).tolist(), strict=True))
    return TokenLogprob(token, float(logits[token] - log_total), top)
