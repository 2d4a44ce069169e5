"""The Mamba block, forward and backward, against transformers' own implementations in the same process.

    python benchmarks/ssm.py [--tokens 512] [--hidden 576] [--threads 2] [--compile]

One block of Mamba-1 shape (state 16, twice the width), one document, fp32, gradient for the input; the median of three
after one that warms up. transformers offers on the CPU: its loop over positions (the default), a parallel scan where
the package mambapy is installed, and, inside torch.compile alone, an associative scan (--compile, which needs a C++
compiler and takes minutes to build). JSON: `ours_s`, `transformers_loop_s`, `transformers_mambapy_s` and
`transformers_compiled_s` where they could run, and `over_transformers` against the best of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from transformers.models.mamba.modeling_mamba import MambaMixer as TheirMixer
from transformers.utils.import_utils import is_mambapy_available

from tunerack.engine.linear import AdaptableLinear, Projection
from tunerack.engine.recurrence import Documents
from tunerack.engine.ssm import MambaMixer

REPEATS = 3


def ours_from(mixer: TheirMixer) -> MambaMixer:
    def group(index: int, name: str) -> AdaptableLinear:
        linear = getattr(mixer, name)
        bias = None if linear.bias is None else linear.bias.data
        return AdaptableLinear(index, [Projection(name, 0, linear.out_features)], linear.weight.data, bias)

    return MambaMixer(
        0, group(0, "in_proj"), mixer.conv1d.weight.data[:, 0].T.flip(0).contiguous(), mixer.conv1d.bias.data,
        group(1, "x_proj"), group(2, "dt_proj"), -torch.exp(mixer.A_log.data).T.contiguous(), mixer.D.data,
        group(3, "out_proj"),
    )  # fmt: skip


def seconds(step: Callable[[], torch.Tensor], direction: torch.Tensor) -> float:
    taken = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        step().backward(direction)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = transformers.MambaConfig(hidden_size=options.hidden, num_hidden_layers=1, vocab_size=16)
    theirs = TheirMixer(config, layer_idx=0).train().requires_grad_(False)
    parallel = copy.copy(theirs)
    parallel.use_mambapy = True
    ours = ours_from(theirs)
    x = torch.randn(options.tokens, options.hidden, requires_grad=True)
    direction = torch.randn_like(x)
    documents = Documents([options.tokens])
    difference = (ours.mix(x, documents, None) - theirs(x[None])[0]).detach().abs().max().item()
    result = {
        "machine": f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}",
        "tokens": options.tokens,
        "hidden": options.hidden,
        "largest_difference": difference,
        "ours_s": seconds(lambda: ours.mix(x, documents, None), direction),
        "transformers_loop_s": seconds(lambda: theirs(x[None])[0], direction),
    }
    if is_mambapy_available():
        result["transformers_mambapy_s"] = seconds(lambda: parallel(x[None])[0], direction)
    if options.compile:
        compiled = torch.compile(theirs)
        result["transformers_compiled_s"] = seconds(lambda: compiled(x[None])[0], direction)
    best = min(value for name, value in result.items() if name.startswith("transformers"))
    result["over_transformers"] = best / result["ours_s"]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
