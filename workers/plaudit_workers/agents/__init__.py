"""Run users' agents, tools and environments in processes of their own, apart from the rollout.

| file | what it does |
| --- | --- |
| ``processes`` | in the rollout: starts the template, has it fork a process for each sample, kills them |
| ``messages`` | what the three kinds of processes send each other |
| ``template`` | imports users' files once, forks, confines and reaps |
| ``load`` | turns the job's sources into what ``sample_process`` runs: tools, agent, program, environment |
| ``sample_process`` | one sample: calls tools, asks the environment, runs the agent or the program |
| ``functions``, ``mcp_server`` | tools: Python functions, servers that speak MCP |
| ``environment``, ``environment_servers``, ``verl_loop`` | environments: TRL and SkyRL, NeMo Gym and OpenEnv, verl |
"""
