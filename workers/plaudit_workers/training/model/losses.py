"""Compute the loss of a micro-batch: policy loss × importance weight, optional KL and entropy terms, aggregated.

A policy loss (``LOSSES``, by ``loss.kind``) is a pure function ``(tokens, anchor, settings)`` that returns one loss a
trained token; ``loss.kind: python`` loads one of the user's. ``policy_loss`` adds what all have in common: ``correct``
for samples of an older policy, ``ESTIMATES`` of the divergence from the starting weights, entropy. Each term is a sum
over tokens of ``token_weights`` × token loss, with weights from the *whole* update: sums over micro-batches and ranks
add up to the same loss whatever the packing.

Three policies meet in an update: μ, the *behaviour* policy that sampled a token (its log-probability came with the
sample); π_prox, the *proximal* policy around which the loss is clipped; π_θ, the one being trained.

Shapes: R trained tokens of a micro-batch, which are those of S whole sequences, one behind another. The ``anchor`` is
float32[R], the log-probability under the policy around which the ratio is clipped.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plaudit_wire.errors import RefusedError

if TYPE_CHECKING:
    from plaudit_job.spec.algorithm import LossSpec
    from plaudit_wire.messages import PolicyVersion
    from plaudit_workers.training.model.batch import TrainingSequence

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before they are exponentiated, as in verl: e^20 is finite in float32, e^100 is not."""
MAX_K3 = 10.0
"""The k3 estimate of a token is cut here, as in verl: at a log-ratio of -10 it would be 22,000."""
MISMATCH = "actor/logprob_mismatch"
"""Mean absolute difference in nats over the tokens of samples that the published policy wrote from first to last."""
MISMATCH_LIMIT = "actor/logprob_mismatch_limit"
"""The largest such difference that the precision explains, in nats."""
_MISMATCH_TOKENS = "actor/logprob_mismatch_tokens"
_MAX_SEQUENCE_LOG_RATIO = 10.0
_FIELD = "spec.algorithm.loss"
_WEIGHT = "weight"
"""Key of the sum of the tokens' weights."""
_AGGREGATED = ("actor/pg_loss", "actor/kl_loss")
"""Figures that are parts of the loss; all others are means over the tokens that had a gradient."""


@dataclass(frozen=True)
class TokenInputs:
    """Hold inputs of the loss for each trained token of a micro-batch; all float32[R] but ``lengths``."""

    logprobs: Tensor
    """log π_θ, with gradient."""
    proximal: Tensor
    """log π_prox."""
    behaviour: Tensor
    """log μ."""
    advantages: Tensor
    weights: Tensor
    """Aggregation weights."""
    lengths: Tensor
    """int64[S]: trained tokens of each sequence; their sum is R."""
    entropies: Tensor | None = None
    """Entropy of the token's distribution, with gradient; needed when ``entropyCoefficient`` is not 0."""
    reference: Tensor | None = None
    """log π_ref of the starting weights; needed when ``klCoefficient`` is not 0."""


@dataclass(frozen=True)
class TokenLosses:
    """Hold policy-gradient losses before importance weights and aggregation, one value a token."""

    losses: Tensor
    """float32[R], with gradient."""
    clipped: Tensor
    """bool[R]: the clip stopped the token's gradient, or cut its weight."""
    bounded: Tensor
    """bool[R]: a bound on the ratio besides the clip acted (dual clip, truncation)."""


@dataclass(frozen=True)
class LossTerms:
    """Hold the loss of a micro-batch and its parts."""

    total: Tensor
    """Scalar with gradient."""
    sums: dict[str, Tensor]
    """Detached scalars, already weighted: their sum over micro-batches and ranks is the update's figure."""


def policy_loss(tokens: TokenInputs, settings: LossSpec, policy: PolicyLoss | None = None) -> LossTerms:
    """Sum the loss of one micro-batch.

    ``L = Σ_t w_t · (c_t · l_t + β · k_t - η · H_t)`` with ``l_t`` the policy loss of ``loss.kind``, ``c_t`` the
    importance weight (``correct``), ``k_t`` the divergence from the starting weights, β ``klCoefficient``, η
    ``entropyCoefficient``. Degenerate: advantages of 0 leave only the KL and entropy terms.
    """
    corrected = correct(tokens, settings)
    found = (policy or choose_loss(settings))(tokens, corrected.anchor, settings)
    token_losses = corrected.weight * found.losses
    logprobs = tokens.logprobs.detach()
    drift = tokens.behaviour - logprobs
    figures = {
        "actor/pg_loss": token_losses,
        "actor/pg_clipfrac": found.clipped.float(),
        "actor/pg_clipfrac_lower": found.bounded.float(),
        "actor/ppo_kl": corrected.anchor - logprobs,
        "actor/behaviour_kl": drift.neg().clamp(max=MAX_LOG_RATIO).expm1() + drift,
        "actor/importance_weight": corrected.weight,
        "actor/importance_capped": corrected.capped.float(),
    }
    if settings.has_kl_term and tokens.reference is not None:
        divergence = ESTIMATES[settings.kl_estimator](tokens.logprobs, tokens.reference)
        if settings.kl_importance_weight:
            divergence = importance_weighted(divergence, tokens.logprobs, corrected.anchor)
        figures["actor/kl_loss"] = divergence
        token_losses = token_losses + settings.kl_coefficient * figures["actor/kl_loss"]
    if tokens.entropies is not None:
        figures["actor/entropy"] = tokens.entropies
        token_losses = token_losses - settings.entropy_coefficient * tokens.entropies
    figures[_WEIGHT] = torch.ones_like(tokens.weights)
    sums = {name: (figure.detach() * tokens.weights).sum() for name, figure in figures.items()}
    return LossTerms((token_losses * tokens.weights).sum(), sums)


def mean_figures(sums: dict[str, float]) -> dict[str, float]:
    """Return an update's figures from the sums over its micro-batches and ranks.

    ``LossTerms.sums`` are weighted as the loss is; the weights need not add up to 1 (``aggregation: constant``,
    sequences without a gradient).
    """
    total = sums[_WEIGHT] or 1.0
    as_they_are = {*_AGGREGATED, MISMATCH, MISMATCH_LIMIT}
    return {name: value if name in as_they_are else value / total for name, value in sums.items() if name != _WEIGHT}


def choose_loss(settings: LossSpec) -> PolicyLoss:
    """Return the policy loss of ``loss.kind``."""
    return load_loss(Path(settings.path), settings.function) if settings.kind == "python" else LOSSES[settings.kind]


def ppo(tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> TokenLosses:
    """Clip the ratio, with clip-higher and dual clip; verl's ``vanilla``.

    ``l_t = -min(r_t A_t, clip(r_t, 1 - clipLow, 1 + clipHigh) A_t)`` with ``r_t = exp(log π_θ - anchor)``; where
    ``A_t < 0`` no more than ``-clipRatioC · A_t``. Sources: Schulman et al. 2017, PPO (arXiv 1707.06347); clip-higher:
    Yu et al. 2025, DAPO (arXiv 2503.14476); dual clip: Ye et al. 2020 (arXiv 1912.09729). Degenerate: at ratio 1 the
    gradient is the plain policy gradient and nothing is clipped.
    """
    gains, is_clipped = _clipped_gains(exp_ratio(tokens.logprobs, anchor), tokens, settings)
    bounded = torch.zeros_like(gains, dtype=torch.bool)
    if settings.clip_ratio_c:
        least = settings.clip_ratio_c * tokens.advantages
        bounded = (tokens.advantages < 0) & (gains < least)
        gains = torch.where(bounded, least, gains)
    return TokenLosses(-gains, is_clipped, bounded)


def _clipped_gains(ratio: Tensor, tokens: TokenInputs, settings: LossSpec) -> tuple[Tensor, Tensor]:
    """Return ``min(r A, clip(r, 1 - clipLow, 1 + clipHigh) A)``, and where the clip acted: bool[R]."""
    unclipped = ratio * tokens.advantages
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    return torch.minimum(unclipped, clipped), clipped < unclipped


def gspo(tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> TokenLosses:
    """Clip one ratio a sequence as a whole, the geometric mean of its tokens' ratios; verl's ``gspo``.

    ``s_i = exp(mean_t (log π_θ - anchor))``, ``l_t = -min(s A, clip(s, 1 - clipLow, 1 + clipHigh) A)``; the gradient
    flows through each token's own log-probability (``s_it = sg[s_i] · π_θ ÷ sg[π_θ]``). The paper's clips are about
    3e-4 and 4e-4, with ``aggregation: sequence``. Source: Zheng et al. 2025, GSPO (arXiv 2507.18071), as verl computes
    it (log-ratio at most 10). Degenerate: with responses of one token it is ``ppo`` without dual clip.
    """
    frozen = tokens.logprobs.detach()
    of_sequence = sequence_means(frozen - anchor, tokens.lengths)
    ratio = (tokens.logprobs - frozen + of_sequence).clamp(max=_MAX_SEQUENCE_LOG_RATIO).exp()
    gains, is_clipped = _clipped_gains(ratio, tokens, settings)
    return TokenLosses(-gains, is_clipped, torch.zeros_like(ratio, dtype=torch.bool))


def cispo(tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> TokenLosses:
    """Cut the ratio that weighs a token's gradient, so that no token loses its gradient; verl's ``cispo``.

    ``l_t = -sg[clip(r_t, 1 - clipLow, 1 + clipHigh)] · A_t · log π_θ``. Source: MiniMax 2025, MiniMax-M1 (arXiv
    2506.13585), as verl computes it. TRL bounds the ratio from above only: give ``clipLow`` near 1 for that.
    Degenerate: at ratio 1 its gradient is the plain policy gradient, but its value is not that of ``ppo``.
    """
    ratio = exp_ratio(tokens.logprobs.detach(), anchor)
    cut = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLosses(-cut * tokens.advantages * tokens.logprobs, cut != ratio, nowhere)


def dppo(tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> TokenLosses:
    """Leave out a token whose probability, not its ratio, has moved too far in its direction; verl's ``dppo_tv``.

    ``l_t = -sg[min(r_t, clipRatioC)] · A_t · log π_θ · keep_t``, where ``keep_t`` is false if ``A_t > 0`` and ``π_θ -
    π_anchor > clipHigh``, or ``A_t <= 0`` and ``π_anchor - π_θ > clipLow``: the clips are differences of probabilities
    here. A ratio punishes rare tokens for moves that hardly change the distribution. Source: 2026, DPPO (arXiv
    2602.04879), binary total variation; its mask is that of prime-rl's default loss, without that loss's penalty on the
    squared log-ratio. Degenerate: equal policies keep every token and give the plain policy gradient.
    """
    frozen = tokens.logprobs.detach()
    ratio, moved = exp_ratio(frozen, anchor), frozen.exp() - anchor.exp()
    keep = torch.where(tokens.advantages > 0, moved <= settings.clip_high, moved >= -settings.clip_low)
    cut = ratio.clamp(max=settings.clip_ratio_c) if settings.clip_ratio_c else ratio
    return TokenLosses(-cut * tokens.advantages * tokens.logprobs * keep, ~keep, (cut < ratio) & keep)


PolicyLoss = Callable[[TokenInputs, Tensor, "LossSpec"], TokenLosses]
LOSSES: dict[str, PolicyLoss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "dppo": dppo}
"""Each ``loss.kind`` of ``LOSS_KINDS`` but ``python``, and its function."""


def load_loss(path: Path, function: str) -> PolicyLoss:
    """Import a user's loss: ``def my_loss(tokens, anchor, settings)``, which returns float32[R] with gradient.

    It gets what the other losses get; importance weights, aggregation, KL and entropy terms are added as for them. The
    loss raises ``RefusedError`` where the function raises, or returns anything but a loss with a gradient for each
    token.
    """
    own = _imported(path, function)

    def loss(tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> TokenLosses:
        if not tokens.logprobs.numel():  # a row that only keeps a rank busy
            losses = tokens.logprobs
        else:
            losses = _checked(_called(own, tokens, anchor, settings), tokens, settings)
        nowhere = torch.zeros_like(losses, dtype=torch.bool)
        return TokenLosses(losses, nowhere, nowhere)

    return loss


def _imported(path: Path, function: str) -> Callable[..., object]:
    try:
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        own = getattr(module, function)
    except Exception as error:  # importing someone else's file raises anything
        raise RefusedError(f"{_FIELD}: {function} in {path} cannot be imported: {error!r}") from error
    if not callable(own):
        raise RefusedError(f"{_FIELD}: {function} in {path} is {type(own).__name__}; name a function")
    return own  # type: ignore[no-any-return]


def _called(own: Callable[..., object], tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> object:
    try:
        return own(tokens, anchor, settings)
    # Someone else's function raises anything; started again it would raise the same.
    except Exception as error:
        lines = [each.lineno for each in extract_tb(error.__traceback__) if each.filename == settings.path]
        place = f", line {lines[-1]}," if lines else ""
        raise RefusedError(
            f"{_FIELD}: {settings.function} in {settings.path}{place} raised {error!r}. It is called as "
            f"{settings.function}(tokens, anchor, settings)"
        ) from error


def _checked(losses: object, tokens: TokenInputs, settings: LossSpec) -> Tensor:
    """Return what a user's function returned, if it is a loss with a gradient for each token."""
    name = f"{_FIELD}: {settings.function} in {settings.path}"
    if not isinstance(losses, Tensor):
        raise RefusedError(f"{name} returned {type(losses).__name__}; return a tensor, one loss a token")
    if losses.shape != tokens.logprobs.shape:
        raise RefusedError(
            f"{name} returned shape {tuple(losses.shape)} for {tokens.logprobs.numel()} tokens; return one loss a token"
        )
    if not losses.requires_grad:
        raise RefusedError(
            f"{name} returned losses without a gradient, so nothing would be trained; compute them from "
            "tokens.logprobs, without detach() or no_grad()"
        )
    return losses


@dataclass(frozen=True)
class Corrected:
    """Hold inputs of the loss from the older policies, one value per token."""

    anchor: Tensor
    """float32[R]: log-probability under the policy around which the loss is clipped."""
    weight: Tensor
    """float32[R]: factor of the token's policy-gradient term."""
    capped: Tensor
    """bool[R]: the importance weight was above the cap, or below the floor."""


def correct(tokens: TokenInputs, settings: LossSpec) -> Corrected:
    """Choose the anchor of the clip and the importance weights. No gradient flows through either.

    | ``loss.correction`` | clipped ratio | importance weight c | above ``correctionCap`` |
    | --- | --- | --- | --- |
    | ``none`` | π_θ ÷ μ | 1 | - |
    | ``tis`` | π_θ ÷ π_prox | π_prox ÷ μ | c is cut to the cap |
    | ``decoupled`` | π_θ ÷ π_prox | π_prox ÷ μ | the policy-gradient term is left out, below ``correctionFloor`` too |
    | ``reject`` | π_θ ÷ π_prox | 1 | the same |

    ``loss.correctionLevel`` chooses the ratio ``π_prox ÷ μ`` that is weighed and compared: a ``token``'s own, the
    product over its ``sequence``, or their ``geometric`` mean (for sequences of any length; the product leaves [1/2, 2]
    soon).

    π_prox is the newest published policy, with which the step began (verl's "old" policy). With one update a step
    (``miniBatchesPerStep`` and ``epochs`` 1) π_prox is π_θ itself and costs nothing; with more, the clip bounds how far
    the step's later updates move away from its beginning, at the price of one more forward pass and one more copy of
    the (sharded) weights. Truncated weights alone would not bound that: with four updates a step on samples two
    versions old, the tiny model of the examples unlearns its task again.

    Sources: ``tis`` Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, as verl's
    rollout correction (``rollout_is: token``, ``sequence``); with a floor, ``decoupled`` is IcePop; ``reject`` is
    verl's ``rollout_rs: token_k1, seq_sum_k1, seq_mean_k1`` for the inverse bounds, but the aggregation still counts
    rejected tokens; ``decoupled`` Hilton et al. 2021 (arXiv 2110.00641) as in AReaL (arXiv 2505.24298) with its cap.
    """
    kind, behaviour = settings.correction, tokens.behaviour
    if kind == "none":
        ones = torch.ones_like(behaviour)
        return Corrected(behaviour, ones, torch.zeros_like(ones, dtype=torch.bool))
    proximal = tokens.proximal.detach()
    log_ratio = proximal - behaviour
    if settings.correction_level == "sequence":
        log_ratio = sequence_sums(log_ratio, tokens.lengths)
    elif settings.correction_level == "geometric":
        log_ratio = sequence_means(log_ratio, tokens.lengths)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind == "tis":
        return Corrected(proximal, ratio.clamp(max=settings.correction_cap), ratio > settings.correction_cap)
    outside = (ratio > settings.correction_cap) | (ratio < settings.correction_floor)
    weight = ratio if kind == "decoupled" else torch.ones_like(ratio)
    return Corrected(proximal, weight.masked_fill(outside, 0.0), outside)


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ``log π_θ - log π_ref``: unbiased, of any sign."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ``(log π_θ - log π_ref)² ÷ 2``: biased, never negative."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ``r - log r - 1`` with ``r = π_ref ÷ π_θ``: unbiased, never negative.

    The log-ratio is cut to ±20 and the estimate to 10: a token beyond that has no gradient.
    """
    log_ratio = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio.exp() - log_ratio - 1).clamp(max=MAX_K3)


ESTIMATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""``loss.klEstimator`` → its estimate of KL(π_θ ‖ π_ref) from the tokens of samples.

Source: Schulman 2020, Approximating KL Divergence; bounds as in verl's ``kl_penalty_forward``. All are 0 for equal
policies. Only the gradient of ``k2`` is that of the divergence; ``k1`` has the right mean and, as a term of the loss,
no useful gradient; ``k3`` is never negative and varies least."""


def importance_weighted(estimates: Tensor, logprobs: Tensor, anchor: Tensor) -> Tensor:
    """Return ``k · π_θ ÷ π_anchor``, with the gradient of both factors: ``loss.klImportanceWeight``.

    For samples of the anchor, a weighted k1 or k3 has the divergence's own gradient; of k3 at ``π_θ = π_anchor`` it is
    ``log(π_θ ÷ π_ref) ∇ log π_θ`` for each token. Source: DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv 2512.02556), as TRL's
    ``use_bias_correction_kl`` for ratios of tokens.
    Degenerate: 0 where the policy equals the reference.
    """
    return estimates * exp_ratio(logprobs, anchor)


def token_weights(aggregation: str, lengths: Sequence[int], max_tokens: int) -> list[float]:
    """Return the weight of each sequence's tokens in the loss of an update; but for ``constant``, all sum to 1.

    | ``loss.aggregation`` | verl's ``loss_agg_mode`` | weight of a token of sequence i |
    | --- | --- | --- |
    | ``token`` | ``token-mean`` | 1 ÷ N |
    | ``sequence`` | ``seq-mean-token-mean`` | 1 ÷ (S · T_i) |
    | ``constant`` | ``seq-mean-token-sum-norm`` | 1 ÷ (S · maxTokens) |

    S sequences of the update, T_i trained tokens of sequence i, N = Σ T_i. Only ``constant`` gives a token the same
    weight whatever the lengths, its own and the others': Liu et al. 2025, Dr. GRPO (arXiv 2503.20783).

    Args:
        lengths: T_i, all at least 1.
    """
    if aggregation == "token":
        return [1 / sum(lengths)] * len(lengths)
    if aggregation == "constant":
        return [1 / (len(lengths) * max_tokens)] * len(lengths)
    return [1 / (len(lengths) * length) for length in lengths]


def mismatch_sums(
    sequences: Sequence[TrainingSequence], version: PolicyVersion | None, published: Tensor, behaviour: Tensor
) -> dict[str, Tensor]:
    """Return a micro-batch's contribution to ``MISMATCH``, which shows whether rollouts sample from published weights.

    A token that was sampled by the policy whose log-probabilities the trainer has must have the same log-probability on
    both sides, but for the kernels' rounding. Tokens of older policies differ rightly and are left out.

    Args:
        sequences: of the micro-batch, in the order in which they lie; none where it only keeps a rank busy.
        version: the published policy's; None if it is not available.
        published: float32[R], its log-probabilities of the trained tokens.
        behaviour: float32[R], those that came with the samples.
    """
    tokens = torch.zeros_like(behaviour)
    if sequences and version is not None:
        written = [all(span[1] == version for span in sequence.version_spans) for sequence in sequences]
        counts = torch.tensor([sequence.num_trained_tokens for sequence in sequences])
        tokens = torch.tensor(written).repeat_interleave(counts).to(tokens)
    return {MISMATCH: ((published - behaviour).abs() * tokens).sum(), _MISMATCH_TOKENS: tokens.sum()}


def mismatch_figures(sums: dict[str, float], limit: float) -> dict[str, float]:
    """Replace the two sums by their quotient, with the limit beside it; without such tokens there is neither."""
    figures = dict(sums)
    total, num_tokens = figures.pop(MISMATCH, 0.0), figures.pop(_MISMATCH_TOKENS, 0.0)
    return figures | ({MISMATCH: total / num_tokens, MISMATCH_LIMIT: limit} if num_tokens else {})


def exp_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return ``exp(numerator - denominator)`` of log-probabilities, the difference cut to ±20: it stays finite."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return each token's sum of its sequence: float32[R]."""
    owners = torch.repeat_interleave(torch.arange(lengths.numel(), device=values.device), lengths.to(values.device))
    sums = torch.zeros(lengths.numel(), dtype=values.dtype, device=values.device).index_add(0, owners, values)
    return sums[owners]


def sequence_means(values: Tensor, lengths: Tensor) -> Tensor:
    """Return each token's mean of its sequence: float32[R]."""
    own = lengths.to(values.device)
    return sequence_sums(values, lengths) / torch.repeat_interleave(own, own)
