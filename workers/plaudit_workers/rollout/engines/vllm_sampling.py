"""Translate a request for a sample into vLLM's sampling parameters. Called by ``vllm_loop``."""

from __future__ import annotations

from vllm.sampling_params import RequestOutputKind, SamplingParams

from plaudit_workers.rollout.engines.protocol import SampleRequest

_SEED_BITS = (1 << 63) - 1


def sampling_parameters(request: SampleRequest) -> SamplingParams:
    """Return vLLM's parameters of a response whose log-probabilities and policy versions are published."""
    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request.seed & _SEED_BITS,
        logprobs=0,
        flat_logprobs=True,
        stop=sampling.stop or None,
        detokenize=bool(sampling.stop),  # vLLM looks for stop texts in the text
        skip_special_tokens=False,  # one of them may be a stop text; nobody reads vLLM's text
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
