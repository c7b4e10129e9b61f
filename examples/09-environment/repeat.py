"""An environment of SkyRL-Gym: it shows one number after the other, and the model repeats each."""

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class RepeatEnv(BaseTextEnv):
    """Numbers to repeat, each worth ``env_config.reward``."""

    def __init__(self, env_config, extras):
        super().__init__()
        self.numbers = extras["reward_spec"]["ground_truth"]
        self.reward = env_config["reward"]

    def init(self, prompt):
        """Show the first number."""
        return [*prompt[:-1], {"role": "user", "content": prompt[-1]["content"] + self.numbers[0]}], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Compare the answer and show the next number."""
        reward = self.reward if action == self.numbers[self.turns] else 0.0
        self.turns += 1
        done = self.turns == len(self.numbers)
        observations = [] if done else [{"role": "user", "content": self.numbers[self.turns]}]
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={})
