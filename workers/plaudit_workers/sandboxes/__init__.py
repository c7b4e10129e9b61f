"""The broker of a run's machines, where rollouts and reward workers may not make them: those that are pods.

::

    server    HTTP, the process ◀ pools (warm machines for admitted prompts) ◀ broker (claims, commands, tests) ◀ places

Its clients are ``plaudit_reward.served_machines``.
"""
