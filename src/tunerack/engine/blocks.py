"""What a decoder layer is made of: a mixer, which moves information between tokens, and a feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tunerack.engine.attention import Attention
from tunerack.engine.experts import ExpertRoute
from tunerack.engine.kernels import RmsNorm, Rotate, SwiGlu
from tunerack.engine.linear import AdaptableLinear
from tunerack.engine.routing import Routing


@dataclass(frozen=True)
class Pass:
    """What every block of a pass is given: who sees whom, cos and sin [tokens, 1, head_dim / 2], the adapters' route,
    and where the routers' decisions are collected."""

    attention: Attention
    cos: Tensor
    sin: Tensor
    route: ExpertRoute | None
    routing: Routing | None = None


class Mixer(Protocol):
    """x [tokens, hidden], normed -> what is added to the residual stream."""

    def __call__(self, x: Tensor, given: Pass) -> Tensor: ...

    def groups(self) -> list[AdaptableLinear]:
        """Its adaptable groups, in the order of computation."""
        ...

    def vectors(self) -> list[Tensor]:
        """Its other frozen weights."""
        ...


class FeedForward(Protocol):
    """x [tokens, hidden], normed -> what is added to the residual stream."""

    def __call__(self, x: Tensor, given: Pass) -> Tensor: ...

    def groups(self) -> list[AdaptableLinear]: ...


@dataclass(frozen=True)
class AttentionMixer:
    """Grouped-query attention with rotary positions; q_norm and k_norm [head_dim] where the family has them."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qkv: AdaptableLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: AdaptableLinear

    def __call__(self, x: Tensor, given: Pass) -> Tensor:
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, v = self.qkv(x, given.route).split((q_size, kv_size, kv_size), -1)
        q, k = q.view(-1, self.heads, self.head_dim), k.view(-1, self.kv_heads, self.head_dim)
        if self.q_norm is not None:
            q = RmsNorm.apply(q, self.q_norm, self.eps)
            k = RmsNorm.apply(k, self.k_norm, self.eps)
        q, k = Rotate.apply(q, given.cos, given.sin), Rotate.apply(k, given.cos, given.sin)
        mixed = given.attention(self.layer, q, k, v.view(-1, self.kv_heads, self.head_dim))
        return self.output(mixed, given.route)

    def groups(self) -> list[AdaptableLinear]:
        return [self.qkv, self.output]

    def vectors(self) -> list[Tensor]:
        return [norm for norm in (self.q_norm, self.k_norm) if norm is not None]


@dataclass(frozen=True)
class Mlp:
    """The dense SwiGLU feed-forward."""

    gate_up: AdaptableLinear
    down: AdaptableLinear

    def __call__(self, x: Tensor, given: Pass) -> Tensor:
        return self.down(SwiGlu.apply(self.gate_up(x, given.route)), given.route)

    def groups(self) -> list[AdaptableLinear]:
        return [self.gate_up, self.down]


@dataclass(frozen=True)
class Layer:
    """h + mixer(norm(h)), then the same with the feed-forward, if there is one; norms [hidden]."""

    mixer_norm: Tensor
    mixer: Mixer
    feed_forward_norm: Tensor | None
    feed_forward: FeedForward | None

    def groups(self) -> list[AdaptableLinear]:
        return [*self.mixer.groups(), *(self.feed_forward.groups() if self.feed_forward is not None else ())]

    def vectors(self) -> list[Tensor]:
        norms = [self.mixer_norm, self.feed_forward_norm]
        return [*self.mixer.vectors(), *(norm for norm in norms if norm is not None)]
