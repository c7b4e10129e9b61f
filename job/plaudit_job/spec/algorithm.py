"""``spec.algorithm``: steps, schedule, advantage, loss, optimizer. ``spec.model``: the policy that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from plaudit_job.spec.section import FilePath, KeyOf, Opaque, Section, SourcePath


@dataclass(frozen=True)
class LossTraits:
    """Describe one policy loss."""

    meaning: str
    """What it computes, for the reference."""
    dual_clip: bool = False
    """It reads ``clipRatioC``."""


LOSS_KINDS: dict[str, LossTraits] = {
    "ppo": LossTraits("the clipped ratio of each token", dual_clip=True),
    "gspo": LossTraits("one ratio a sequence (with clips of about 3e-4)"),
    "cispo": LossTraits("the ratio is cut, but every token keeps its gradient"),
    "dppo": LossTraits(
        "a token is left out when its probability has moved by more than clipLow or clipHigh", dual_clip=True
    ),
    "python": LossTraits("your function"),
}
"""Every kind of policy loss. The function that computes it: ``LOSSES`` of ``training.model.losses``."""
LossKind = Annotated[str, KeyOf(LOSS_KINDS, "Default ppo: what most published runs use.")]


class AdaptiveKlSpec(Section):
    """A coefficient of the KL divergence that follows a target (Ziegler et al. 2019)."""

    target: float = Field(default=0.1, gt=0)
    """Mean divergence of a token from the starting weights, in nats: above it the coefficient grows, below it falls.
    Default 0.1: verl's."""
    horizon: int = Field(default=10_000, ge=1)
    """Samples in which the coefficient changes by 20 % at most. Default 10,000: verl's."""


class LossSpec(Section):
    """The policy loss: clipped ratio, optional KL and entropy terms, correction of stale samples."""

    kind: LossKind = "ppo"
    path: FilePath = ""
    """Python file of the loss, for ``python``: relative to the job file; on Kubernetes a file of ``spec.files``, or an
    absolute path on the volume or in the image."""
    function: str = ""
    """The function in it, ``my_loss(tokens, anchor, settings)``, which returns the loss of each token, for
    ``python``."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped below 1 - clipLow. Default 0.2: PPO's."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is clipped above 1 + clipHigh. Default 0.28: DAPO's clip-higher, which leaves room for rare tokens to
    grow; set it to clipLow for plain PPO."""
    clip_ratio_c: float = Field(default=3.0, ge=0)
    """Dual clip: a token of negative advantage counts at most this many times, however far its ratio has grown. Default
    3: verl's. 0: no bound."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """``token``: mean over all tokens of the mini-batch; ``sequence``: mean over each sequence, then over sequences;
    ``constant``: sum over each sequence ÷ maxTokens, then mean over sequences (Dr. GRPO). Default token: long answers
    weigh by their length (DAPO)."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the starting weights, which are then held in memory a second time. Default 0:
    none, as in DAPO."""
    adaptive_kl: AdaptiveKlSpec | None = None
    """Let klCoefficient follow a target after each update, for ``klIn: reward``. Default: it is fixed."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimate of the divergence from a sampled token: the log-ratio, half its square, or Schulman's k3. Default
    k3: verl's and TRL's; ``k2`` has the divergence's own gradient."""
    kl_importance_weight: bool = False
    """Weigh the estimate by the token's probability under the policy, divided by that under the one around which the
    loss is clipped: ``k1`` and ``k3`` then have the divergence's own gradient, for ``klIn: loss``. Default false:
    verl's; TRL's ``use_bias_correction_kl`` is true."""
    kl_in: Literal["loss", "reward"] = "loss"
    """``loss``: the divergence is a term of each token's loss; ``reward``: it is subtracted from the sample's reward,
    summed over its tokens, before advantages are computed. Default loss: GRPO's."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus. Default 0: large models rarely need one; small ones do."""
    correction: Literal["none", "tis", "decoupled", "reject"] = "tis"
    """Correction for samples of an older policy. ``tis`` and ``decoupled`` weigh a token by the ratio of its
    probability under the policy at the start of the step to that under the policy that sampled it, and clip around the
    former. Above the cap, ``tis`` truncates the weight and ``decoupled`` leaves the token out; ``reject`` does so
    without weighing the others. ``none`` clips around the policy that sampled. Default tis: it also corrects
    differences between engine and trainer, and is close to 1 on fresh samples."""
    correction_cap: float = Field(default=2.0, gt=0)
    """The largest importance weight. Default 2: TIS's published choice."""
    correction_floor: float = Field(default=0.0, ge=0)
    """The smallest importance weight, for ``decoupled`` and ``reject``: they leave out what is below. Default 0: no
    floor."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio that is weighed and compared with cap and floor: each ``token``'s, the product over its ``sequence``,
    or their ``geometric`` mean. Default token: a product over long responses exceeds any cap."""

    @property
    def penalises_reward(self) -> bool:
        """Return True if the KL divergence lowers the rewards."""
        return self.kl_in == "reward" and self.kl_coefficient > 0

    @property
    def has_kl_term(self) -> bool:
        """Return True if the KL divergence is a term of the loss."""
        return self.kl_in == "loss" and self.kl_coefficient > 0


class OptimizerSpec(Section):
    """AdamW with a linear warm-up, then a constant or falling rate."""

    learning_rate: float = Field(default=1e-6, gt=0, le=10)
    """The rate after the warm-up. Default 1e-6: usual for RL on a pretrained model; a model from scratch takes about
    1e-3."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the gradient to this norm. Default 1."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate grows from 0. Default 0: RL at these rates starts from a trained model."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The rate after the warm-up: constant, or falling to minRateShare of it until the last step. Default constant:
    usual for RL, whose end is rarely known beforehand."""
    min_rate_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the rate that is left after the last step, for ``linear`` and ``cosine``. Default 0."""
    weight_decay: float = Field(default=0.01, ge=0, lt=1)
    """Decoupled weight decay. Default 0.01: PyTorch's and verl's."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients. Default 0.9: PyTorch's and verl's."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the mean of squared gradients. Default 0.999: PyTorch's and verl's."""


class DynamicSamplingSpec(Section):
    """DAPO's dynamic sampling: groups whose scores are all equal are dropped, and further prompts take their place."""

    max_factor: float = Field(default=3.0, gt=1, le=100)
    """Prompts of a step at most, as a multiple of promptsPerStep; beyond them, groups with equal scores count. Default
    3: a step of which two thirds have no signal is still full."""


class AlgorithmSpec(Section):
    """Number and size of steps, staleness of samples, advantage, loss and optimizer."""

    steps: int = Field(ge=1, le=10_000_000)
    """Training steps of the run; each ends with a new policy version."""
    prompts_per_step: int = Field(default=64, ge=1, le=1_000_000)
    """Groups in each step. Default 64: with 8 samples each, 512 samples, a usual GRPO batch."""
    samples_per_prompt: int = Field(default=8, ge=1, le=4096)
    """Samples of a group. Default 8: fewer make the group's mean noisy."""
    mini_batches_per_step: int = Field(default=1, ge=1, le=4096)
    """The step's groups are trained in this many updates, each as soon as its share is ready: training overlaps the
    slowest rewards. Which groups share an update then depends on their speed. Default 1: the unbiased reference."""
    epochs: int = Field(default=1, ge=1, le=64)
    """Updates on each mini-batch, one after the other. Default 1: each sample is used once; more needs a clip that
    acts, around the policy at the start of the step."""
    max_staleness: int = Field(default=0, ge=0, le=1000)
    """How many policy versions a trained sample may be behind: 0 on-policy, 1 one-step off-policy (step s+1 generates
    and scores while step s trains), k asynchronous. Default 0: the reference."""
    order: Literal["step", "ready"] = "step"
    """``step``: a step trains the groups that were admitted for it; ``ready``: the groups that are ready first, within
    ``maxStaleness`` (at least 1). Default step: steps follow the order of the data."""
    advantage: Literal["grpo", "drGrpo", "rloo", "reinforcePlusPlus", "reinforcePlusPlusBaseline"] = "grpo"
    """The advantage of a sample: ``grpo`` (reward - mean) / standard deviation of its group, ``drGrpo`` without the
    division, ``rloo`` against the mean of the others, ``reinforcePlusPlus`` normalised over the batch,
    ``reinforcePlusPlusBaseline`` the same of reward - mean of its group. Default grpo: the most widely used."""
    advantage_per: Literal["sample", "turn"] = "sample"
    """``sample``: all tokens of a sample share one advantage; ``turn``: each turn of a conversation has its own, from
    its reward without what the environment had paid before that turn, compared with the same turn of the group's
    other samples. ``turn`` requires agent kind environment or custom and a scorer of kind ``environment``. Default
    sample."""
    mask_truncated: bool = False
    """Train no token of a sample that ended at a limit (``finish_reason: length``, or ``timeout`` in a machine); its
    score stays in its group's advantages. Default false: a cut response is trained by its score, as any other.
    """
    filter_truncated: bool = False
    """Treat a sample that ended at a limit as one without a score: it is not trained, and the advantages of its group,
    and ``dynamicSampling``, leave its score out. Default false.
    """
    dynamic_sampling: DynamicSamplingSpec | None = None
    """Replace groups whose scores are all equal, which teach nothing under a group-relative advantage. Default: they
    count, and are not computed."""
    loss: LossSpec = LossSpec()
    """The policy loss."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The optimizer."""

    @property
    def updates_per_step(self) -> int:
        """Return the number of updates of the weights in each step."""
        return self.mini_batches_per_step * self.epochs

    @property
    def max_replaced(self) -> int:
        """Return the number of groups that a step replaces at most."""
        sampling = self.dynamic_sampling
        return 0 if sampling is None else int((sampling.max_factor - 1) * self.prompts_per_step)


class ModelSpec(Section):
    """The policy: weights, tokenizer and precision."""

    source: SourcePath = Field(min_length=1)
    """The starting weights: a hub id (``Qwen/Qwen2.5-0.5B-Instruct``) or a folder with ``config.json`` and safetensors.
    A folder starts with ``./`` or ``/``, or is next to the job file under that name."""
    revision: str = "main"
    """Branch, tag or commit on the hub; name a commit to make a run repeatable. Default ``main``. Ignored for a folder.
    """
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the forward passes of trainer and rollout, and of published weights. Default bfloat16: the usual
    choice on GPUs; use float32 on a CPU, or to compare log-probabilities exactly."""
    trust_remote_code: bool = False
    """Run Python code of the model. Default false: it would run with the rights of every worker."""
    tokenizer: SourcePath = ""
    """Hub id or folder of the tokenizer. Default empty: the one in ``source``."""
    tokenizer_revision: str = "main"
    """Branch, tag or commit of ``tokenizer`` on the hub. Default ``main``. Ignored for a folder, and without
    ``tokenizer``: then ``revision`` applies to both."""
    chat_template: FilePath = ""
    """A Jinja file that turns messages into text. Default empty: the tokenizer's own template; without one, the
    messages' contents are joined."""
    chat_template_arguments: Opaque = Field(default={})
    """Further variables of the chat template, such as ``enable_thinking: false``. Default: none."""
