"""Compute the policy on one rank of the trainer, by the parts that ``policy_model`` joins.

A batch of scored samples gets its advantages (``batch``), is laid in rows (``packing``, images by ``checks``), run
through the model (``head``; over several ranks ``sequence_parallel``), and its ``losses`` are summed for the
``optimizer``. ``sharding`` places the parameters, ``memory`` what the layers keep; ``lora`` trains adapters instead.
``state_copy`` copies the state for checkpoints, ``weight_offer`` the weights for rollouts.
"""
