"""Run a rollout worker: it takes prompts, generates their samples with the announced policy, and publishes them.

| file | what it does |
| --- | --- |
| ``worker`` | the process and its loop; builds the job's engine and agent; a replica's other pods |
| ``prompt_work`` | one prompt: its missing samples, their agents, seeds and timings |
| ``weights`` | keeps the engine on the announced policy |
| ``agents`` | hold a sample's conversation with the policy |
| ``engine`` | the protocols of policies and engines |
| ``served`` | a policy without weights: any server of OpenAI's API, for ``plaudit try`` |
| ``scripted`` | an engine without a model |
| ``vllm_engine``, ``vllm_loop``, ``vllm_arguments`` | vLLM: the asyncio side, the driving thread, the arguments |
"""
