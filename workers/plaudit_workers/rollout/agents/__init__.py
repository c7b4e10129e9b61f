"""Hold a sample's conversation with the policy: from a prompt to a trajectory.

| file | what it does |
| --- | --- |
| ``agent`` | the protocol of agents; ``singleTurn`` and ``custom`` |
| ``tools`` | ``tools`` and ``environment``: the policy calls tools, or acts in an environment |
| ``chat`` | continues a conversation token by token |
| ``tool_calls`` | reads the tool calls of the policy's turns |
| ``endpoint`` | ``endpoint``: a program asks over OpenAI's API |
| ``session`` | what one such program asked, and the trajectory made of it |
"""
