"""The Kubernetes operator that reconciles RLJobs and RewardServices. No other part imports it.

operator     the process: watches fill a queue, workers drain it while this process holds the Lease (``__main__``)
planning     one job: observe, plan, apply, report; ``plan`` is a pure function of what was observed
status       what is reported: conditions, roles, progress, cost
children     the manifests of a job: pod templates by role and the objects around them
policies     deadlines, gangs, refused pods; beside it ``actions`` (what a plan does) and ``attempts`` (what follows
the end of one)
admission    what is frozen when a job is admitted, and which edits take effect; ``services`` for RewardServices
observed     the planner's input, read with ``pod_state`` and filled from the ``cache``
runtime      API server, watches, queue, Lease, health port: knows nothing of RLJobs
crd          the CustomResourceDefinitions, generated from the models, with ``crd_rules`` in CEL
plugin       ``kubectl plaudit``, which ``plugin_bundle`` packs into one file
"""
