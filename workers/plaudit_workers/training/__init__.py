"""Train the policy: admit prompts, wait for their scores, update, publish, close.

==========================  ===========================================================================================
worker                      The process of one rank: rank 0 conducts, the others follow.
conductor                   The steps of a run, its records, its periodic work.
step, validation            One step of training, mini-batch by mini-batch; an evaluation between two steps.
schedule                    Which prompts are admitted and which groups trained, and the ledger of both. Pure.
state                       What these share: plan, lineage, order of the prompts, current state.
groups                      The way of a group: admitted, accepted when ready, ended.
turns                       Announcements of policies, and whose turn it is on shared GPUs.
resume                      The state that a trainer takes over; the protocol of the backend that it drives.
backend, scripted           That backend with torch, and a stand-in without a model.
checkpoint, publish,        The backend's files: states to continue from, weights to sample with, whole models to
export                      take away.
data                        The prompts of a data file.
sinks, stored_samples       The figures and the samples of a step, written for people.
model                       The policy on one rank: ``batch`` → ``packing`` → ``policy_model`` with ``losses``.
==========================  ===========================================================================================
"""
