"""A fine-tuning job, as asked for and as resolved.

`auto` is resolved once, by `estimate.plan`, into a new spec; the resolved spec is what is stored and all that a worker
reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]

# The linear layers of a decoder block, by the names PEFT uses.
LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Of Mamba blocks; "all-linear" takes the first two of them.
MIXER_MODULES = ("in_proj", "x_proj", "dt_proj", "out_proj")
# Of mixtures of experts: the router, under the names of Mixtral and of BlackMamba.
ROUTER_MODULES = ("gate", "router")
# Of an expert, by Mixtral's names: gate, down and up.
EXPERT_MODULES = ("w1", "w2", "w3")
ADAPTABLE_MODULES = (*LINEAR_MODULES, *MIXER_MODULES, *ROUTER_MODULES, *EXPERT_MODULES)


@dataclass(frozen=True)
class LoraSpec:
    """The low-rank update of one adapter (Hu et al. 2021, arXiv 2106.09685).

    rank: inner dimension r of B·A
    alpha: the update is scaled by alpha/r, or alpha/sqrt(r) with `use_rslora` (arXiv 2312.03732)
    dropout: probability that an input feature of an adapted layer is dropped in training
    target_modules: names of the adapted linear layers; "all-linear" stands for every one
    layers_to_transform: numbers of the decoder layers that are adapted, from 0; every one when left out
    use_rslora: scale by alpha/sqrt(r)
    use_dora: train the length of each row of the adapted weight too (DoRA, arXiv 2402.09353)
    loraplus_ratio: learning rate of B and of DoRA's lengths, as a multiple of that of A (LoRA+, arXiv 2402.12354)
    rank_pattern: other ranks for modules whose full name matches the key, as PEFT matches it
    alpha_pattern: other alphas for modules whose full name matches the key
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = LINEAR_MODULES
    layers_to_transform: tuple[int, ...] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    loraplus_ratio: float = 1.0
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class JobSpec:
    """Everything that decides the result of a fine-tune.

    model: catalogue name of the base model
    training_file: file id of the rows to train on
    validation_file: file id of rows that are only scored
    suffix: goes into the name of the adapter
    adapter_name: the whole name of the adapter, instead of a suffix
    n_epochs: passes over the kept rows
    max_steps: ends the job after this many optimizer steps; 0 sets no bound
    batch_size: rows per optimizer step
    learning_rate: peak value, AdamW
    lr_schedule: shape of the learning rate after the warm-up
    warmup_steps: optimizer steps over which the learning rate rises from 0
    weight_decay: AdamW's decoupled decay
    adam_beta1: decay of AdamW's first moment
    adam_beta2: decay of AdamW's second moment
    adam_epsilon: AdamW's term in the denominator
    max_grad_norm: gradients of an adapter are scaled down to this norm
    seq_len: rows longer than this many tokens are treated as `overlong` says
    overlong: leave rows that are too long out, refuse the file, or split them into documents of seq_len tokens
    duplicates: keep rows that are the same as an earlier one, or drop them
    bad_rows: refuse the file for one malformed row, or drop such rows and count them
    method: lora trains an adapter, qlora one on a base in 4 bits, full every weight of a copy of the base
    train_on: whose tokens carry loss: every assistant message, the last one, every token, or custom by each weight
    min_kept: least share of rows that must be kept for the job to run
    seed: of the adapter's first values, the order of rows and dropout
    checkpoint_steps: optimizer steps between checkpoints
    eval_steps: optimizer steps between evaluations on the validation rows; 0 evaluates after every epoch
    early_stopping_patience: ends the job after so many evaluations in a row without a better loss; 0 never does
    keep: which checkpoint becomes the adapter: the last one, or the best one on the validation rows
    lora: the update that is trained
    """

    model: str
    training_file: str
    validation_file: str | None = None
    suffix: str | None = None
    adapter_name: str | None = None
    n_epochs: int | Auto = AUTO
    max_steps: int = 0
    batch_size: int | Auto = AUTO
    learning_rate: float | Auto = AUTO
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int | Auto = AUTO
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    seq_len: int | Auto = AUTO
    overlong: Literal["drop", "refuse", "split"] = "drop"
    duplicates: Literal["keep", "drop"] = "keep"
    bad_rows: Literal["refuse", "drop"] = "refuse"
    method: Literal["lora", "qlora", "full"] = "lora"
    train_on: Literal["assistant", "last", "all", "custom"] = "assistant"
    min_kept: float = 0.5
    seed: int = 0
    checkpoint_steps: int | Auto = AUTO
    eval_steps: int = 0
    early_stopping_patience: int = 0
    keep: Literal["last", "best"] = "last"
    lora: LoraSpec = field(default_factory=LoraSpec)

    @property
    def resolved(self) -> bool:
        """True when nothing is left to "auto"."""
        return AUTO not in (
            self.n_epochs,
            self.batch_size,
            self.learning_rate,
            self.warmup_steps,
            self.seq_len,
            self.checkpoint_steps,
        )

    def with_values(self, **values: Any) -> JobSpec:
        return replace(self, **values)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; `spec.parse.job_from_json` reads it back unchanged."""
        values = asdict(self)
        values["lora"]["target_modules"] = list(self.lora.target_modules)
        layers = self.lora.layers_to_transform
        values["lora"]["layers_to_transform"] = None if layers is None else list(layers)
        values["lora"]["rank_pattern"] = dict(self.lora.rank_pattern)
        values["lora"]["alpha_pattern"] = dict(self.lora.alpha_pattern)
        return values
