"""``kind: environment``: classes of TRL's, SkyRL's and verl's form in real processes."""

from __future__ import annotations

import asyncio
import json
import re

import numpy as np
import pytest
import pytest_asyncio

import episodes
from episodes import call
from plaudit_wire.errors import RefusedError
from plaudit_wire.records import AgentReward
from plaudit_workers.agents.messages import EnvironmentClass
from plaudit_workers.agents.processes import AgentProcesses

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM and torch warn when they are imported
    pytest.mark.asyncio(loop_scope="module"),  # the tests share template processes, and so the event loop
]

SAMPLES = 64
"""Each is a fork of a template process."""

CLASSES = '''
import functools, json, os, random, signal, time
import numpy as np


class Counter:
    """TRL's form."""

    def __init__(self, step=1):
        self.step_size = step

    def reset(self, answer, **kwargs):
        self.value, self.goal = 0, int(answer)
        return f" Reach {self.goal}."

    def add(self, times: int) -> str:
        """Add a number of steps.

        Args:
            times: number of steps
        """
        self.value += times * self.step_size
        return f"now {self.value}"

    def _hidden(self):
        return None

    def get_reward(self):
        return 1.0 if self.value == self.goal else 0.5


class Ends:
    """Ends as the data row asks."""

    def reset(self, how, marker="", **kwargs):
        self.how = how
        if how == "no reset":
            raise RuntimeError("no board")
        if how == "hangs in reset":
            time.sleep(60)
        if how == "dies once" and not os.path.exists(marker):
            open(marker, "w").close()
            how = "dies in reset"
        if how == "dies in reset":
            os.kill(os.getpid(), signal.SIGSEGV)

    def look(self) -> str:
        """Look."""
        if self.how == "dies in a tool":
            os.kill(os.getpid(), signal.SIGSEGV)
        return "nothing"

    async def get_reward(self):
        if self.how == "raises":
            raise ValueError("no goal")
        if self.how == "hangs":
            time.sleep(60)
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        return {"no reward": None, "no number": float("nan")}.get(self.how, 1.0)


class WithoutReward:
    def reset(self):
        return None


def make_counter():
    return Counter(step=3)


class Guess:
    """SkyRL's form."""

    def __init__(self, env_config, extras={}):
        self.goal = int(extras["reward_spec"]["ground_truth"])
        self.hint = env_config.hint
        self.turns, self.max_turns = 0, extras["max_turns"]

    def init(self, prompt):
        return [{"role": "system", "content": self.hint}, *prompt], {}

    def step(self, action):
        self.turns += 1
        if action == "raise":
            raise ValueError("bad action")
        if action == "hang":
            time.sleep(60)
        if action == "die":
            os._exit(3)
        if action == "big":
            return {"observations": [{"role": "user", "content": "a", "n": 1 << 67}], "reward": 1, "done": True}
        if action == "endless":
            return {"observations": [], "reward": 10**400, "done": True}
        if action == "more":
            more = [{"role": "user", "content": "more"}]
            return {"observations": more, "reward": None, "done": False, "metadata": {}}
        done = action == str(self.goal) or self.turns == self.max_turns
        shown = [] if done else [{"role": "user", "content": "higher"}]
        reward = 1.0 if action == str(self.goal) else 0.25
        return {"observations": shown, "reward": reward, "done": done, "metadata": {}}

    def close(self):
        pass


RNG, LEGACY, OWN = np.random.default_rng(), np.random.RandomState(), random.Random()


class Source:
    def __init__(self):
        self.rng = np.random.default_rng()


cached = functools.cache(Source)
cached()


class Draws:
    rng = np.random.default_rng(3)
    bits = np.random.PCG64()

    def reset(self, seed=None, **columns):
        self.seed = seed

    def draw(self) -> str:
        """Draw."""
        libraries, module = (random.random, np.random.rand), (RNG.random, LEGACY.rand, OWN.random)
        sources = *libraries, *module, self.rng.random, self.bits.random_raw, cached().rng.random
        return json.dumps([*(float(source()) for source in sources), self.seed])

    def order(self) -> str:
        """Walk through a set."""
        return " ".join({str(number) for number in range(50)})


class NoEnvironment:
    pass


class Loop:
    """verl's form."""

    def __init__(self, trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config, **kwargs):
        self.server, self.tokenizer, self.kwargs = server_manager, tokenizer, kwargs
        self.length = trainer_config.config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params, how="", **row):
        prompt = self.tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, tokenize=True)
        prompt = list(prompt["input_ids"]) if hasattr(prompt, "keys") else list(prompt)
        if how == "hot":
            sampling_params = {**sampling_params, "temperature": 0.2}
        generate = lambda ids: self.server.generate(request_id="r", prompt_ids=ids, sampling_params=sampling_params)
        first = await generate(prompt)
        await generate([*prompt, 5])  # discarded
        between = self.tokenizer("again", add_special_tokens=False)["input_ids"]
        second = await generate(prompt + first.token_ids + between)
        response = first.token_ids + between + second.token_ids
        mask = [1] * len(first.token_ids) + [0] * len(between) + [1] * len(second.token_ids)
        if how == "cut":
            response, mask = response[:-2], mask[:-2]
        if how == "changed":
            response = [7, *response[1:]]

        class Output:
            prompt_ids, response_ids, response_mask = prompt, response, mask
            reward_score, extra_fields = 0.75, {"turn_scores": [0.5, 0.25], "tool_rewards": []}

        return Output
'''


@pytest.fixture(scope="module")
def model_folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return folder


@pytest.fixture(scope="module")
def class_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "my_environments.py"
    path.write_text(CLASSES)
    return str(path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_agent(tokenizer, class_file, model_folder):
    """Opens the agent of a class; the tests share the processes of each."""
    opened: dict[str, AgentProcesses] = {}

    async def open_agent(class_name, arguments=(), limit_s=20.0, **limits):
        source = EnvironmentClass(class_file, class_name, dict(arguments), 3, 20.0, {"source": str(model_folder)})
        processes = opened.setdefault(class_name, AgentProcesses([source]))
        return await episodes.open_agent(processes, tokenizer, limit_s, **limits)

    yield open_agent
    for processes in opened.values():
        await processes.close()


def ids_of(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


@pytest.mark.parametrize(
    ("class_name", "arguments", "times", "value", "reward"),
    [("Counter", {"step": 2}, 3, 6, 1.0), ("make_counter", {}, 1, 3, 0.5)],
)
async def test_an_environment_of_trl_is_reset_played_and_rewards(
    open_agent, play, class_name, arguments, times, value, reward
) -> None:
    agent = await open_agent(class_name, arguments=arguments)
    assert list(agent.tools) == ["add"]
    _, body = await play(agent, call("add", times=times), "Done.")
    assert body.sample.messages == [{"role": "user", "content": "Play. Reach 6."}]
    # Scorers get the prompt as the policy read it, its special tokens too.
    assert body.sample.prompt == agent.template.render(body.sample.messages, generate=True)
    assert [m["content"] for m in body.sample.completion if m["role"] == "tool"] == [f"now {value}"]
    assert body.sample.agent_reward == AgentReward("scored", reward)
    assert body.sample.environment == {"goal": 6, "step_size": value // times, "value": value}
    # The ids that are trained are those of the whole conversation, with the prompt that the environment wrote.
    conversation = [*body.sample.messages, *body.sample.completion]
    whole = agent.template.encode(agent.template.render(conversation, generate=False).removesuffix("\n"))
    assert ids_of(body.prompt_ids) + ids_of(body.response_ids) == whole


@pytest.mark.parametrize(
    ("how", "outcome", "reason"),
    [
        ("no reward", "skipped", "the environment gave no reward"),
        ("raises", "data_error", "ValueError: no goal"),
        ("no number", "data_error", "DataError: the reward nan is not a finite number"),
        ("hangs", "timeout", "finish of the environment gave no answer within 0.5 s"),
        ("dies", "infra_error", "the environment's process was killed by SIGSEGV"),
    ],
)
async def test_a_missing_reward_is_typed_and_never_zero(open_agent, play, how, outcome, reason) -> None:
    agent = await open_agent("Ends", limit_s=0.5 if how == "hangs" else 20.0)
    _, body = await play(agent, "Done.", extra_info={"how": how})
    assert body.sample.agent_reward == AgentReward(outcome, reason=reason)
    assert body.sample.failure is None
    # Other functions may read what an environment holds that cannot tell its reward.
    assert body.sample.environment == (None if how in ("hangs", "dies") else {"how": how})
    assert body.prompt_ids == b""  # reset returned nothing: the prompt is the group's


async def test_an_environment_without_rewards_leaves_them_to_the_scorers(open_agent, play) -> None:
    _, body = await play(await open_agent("WithoutReward"), "Done.")
    assert (body.sample.agent_reward, body.sample.answer) == (None, "Done.")


async def test_an_environment_that_dies_in_a_tool_ends_its_sample(open_agent, play) -> None:
    _, body = await play(await open_agent("Ends"), call("look"), "Done.", extra_info={"how": "dies in a tool"})
    assert body.sample.failure == AgentReward("infra_error", reason="the process that ran look was killed by SIGSEGV")
    assert body.sample.agent_reward is None


@pytest.mark.parametrize(
    ("how", "outcome", "reason"),
    [
        ("no reset", "data_error", "RuntimeError: no board"),
        ("hangs in reset", "timeout", "reset of the environment gave no answer within 0.5 s"),
        ("dies in reset", "infra_error", "the environment's process was killed by SIGSEGV"),
    ],
)
async def test_an_environment_that_cannot_be_reset_ends_its_sample_without_a_score(
    open_agent, play, how, outcome, reason
) -> None:
    agent = await open_agent("Ends", limit_s=0.5 if how == "hangs in reset" else 20.0)
    _, body = await play(agent, "Done.", extra_info={"how": how})
    assert body.sample.failure == AgentReward(outcome, reason=f"the environment cannot be reset: {reason}")
    assert (body.sample.agent_reward, body.sample.response_tokens, body.prompt_ids) == (None, 1, b"")


async def test_a_reset_whose_process_dies_is_repeated_in_another_process(open_agent, play, tmp_path) -> None:
    agent = await open_agent("Ends")
    _, body = await play(agent, "Done.", extra_info={"how": "dies once", "marker": str(tmp_path / "died")})
    assert (body.sample.failure, body.sample.agent_reward) == (None, AgentReward("scored", 1.0))


async def test_an_environment_of_skyrl_reads_each_turn(open_agent, play) -> None:
    agent = await open_agent("Guess", arguments={"hint": "One digit."})
    _, body = await play(agent, "2", "6", "never asked")
    sample = body.sample
    assert sample.messages == [{"role": "system", "content": "One digit."}, {"role": "user", "content": "Play."}]
    assert [(m["role"], m["content"]) for m in sample.completion] == [
        ("assistant", "2"),
        ("user", "higher"),
        ("assistant", "6"),
    ]
    assert (sample.turn_rewards, sample.agent_reward) == ([0.25, 1.0], AgentReward("scored", 1.25))
    assert [[(c.tool, c.outcome) for c in turn.calls] for turn in body.generation.turns] == [[("step", "ok")]] * 2
    conversation = [*sample.messages, *sample.completion]
    whole = agent.template.encode(agent.template.render(conversation, generate=False).removesuffix("\n"))
    assert ids_of(body.prompt_ids) + ids_of(body.response_ids) == whole


async def test_a_turn_without_a_reward_leaves_later_rewards_in_their_place(open_agent, play) -> None:
    agent = await open_agent("Guess", arguments={"hint": "One digit."})
    _, body = await play(agent, "more", "2", "6")
    assert body.sample.turn_rewards == [0.0, 0.25, 1.0]
    assert body.sample.agent_reward == AgentReward("scored", 1.25)


@pytest.mark.parametrize(
    ("action", "outcome", "reason"),
    [
        ("raise", "data_error", "ValueError: bad action"),
        ("hang", "timeout", "step of the environment gave no answer within 0.5 s"),
        ("die", "infra_error", "the environment's process ended with exit code 3"),
        ("big", "data_error", f"observations[0].n: is an integer beyond 64 bits ({1 << 67}); write it as text"),
        ("endless", "data_error", f"DataError: the reward 1{'0' * 58}… is not a finite number"),
    ],
)
async def test_a_failed_step_ends_the_sample_without_a_score(open_agent, play, action, outcome, reason) -> None:
    agent = await open_agent("Guess", arguments={"hint": "One digit."}, limit_s=0.5 if action == "hang" else 20.0)
    _, body = await play(agent, "2", action)
    assert body.sample.failure == AgentReward(outcome, reason=reason)


async def test_an_episode_ends_at_the_limits_of_turns_and_tokens(open_agent, play) -> None:
    agent = await open_agent("Guess", arguments={"hint": "One digit."}, turns=2)
    _, body = await play(agent, "more")
    assert len(body.generation.turns) == 2
    assert body.sample.agent_reward is None
    _, body = await play(agent, "more", max_tokens=8)
    assert (len(body.generation.turns), body.sample.finish_reason) == (1, "length")


@pytest.mark.long  # imports verl
async def test_an_agent_loop_of_verl_generates_by_token_ids(open_agent, play, tokenizer) -> None:
    prompt_ids, body = await play(await open_agent("Loop"), "one", "discarded", "two")
    ids, mask = np.frombuffer(body.response_ids, "<i4"), np.frombuffer(body.loss_mask, "u1") != 0
    assert tokenizer.decode(ids) == "one<|im_end|>againtwo<|im_end|>"
    assert tokenizer.decode(ids[mask]) == "one<|im_end|>two<|im_end|>"
    logprobs = np.frombuffer(body.logprobs, "<f4")
    assert ((logprobs != 0) == mask).all()
    assert body.prompt_ids == b""
    assert prompt_ids
    assert (body.sample.turn_rewards, body.sample.agent_reward) == ([0.5, 0.25], AgentReward("scored", 0.75))


@pytest.mark.long  # imports verl
async def test_an_agent_loop_may_cut_its_response(open_agent, play, tokenizer) -> None:
    _, body = await play(await open_agent("Loop"), "one", "discarded", "two", extra_info={"how": "cut"})
    assert tokenizer.decode(ids_of(body.response_ids)) == "one<|im_end|>againtw"


@pytest.mark.long  # imports verl
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("changed", "response_mask is 1 at token 0 of the response, but the policy did not sample this token"),
        ("hot", r"an agent loop cannot change the sampling of a run \({'temperature': 0.2}\)"),
    ],
)
async def test_an_agent_loop_that_would_spoil_training_is_refused(open_agent, play, how, message) -> None:
    agent = await open_agent("Loop")
    _, body = await play(agent, "one", "discarded", "two", "told nothing", extra_info={"how": how})
    assert body.sample.failure.outcome == "data_error"
    assert re.search(message, body.sample.failure.reason)
    assert body.sample.agent_reward is None


async def test_a_class_that_is_no_environment_is_refused(open_agent) -> None:
    with pytest.raises(RefusedError, match=r"NoEnvironment in .* is no environment: it needs reset \(TRL\)"):
        await open_agent("NoEnvironment")
    with pytest.raises(RefusedError, match="has no class 'Absent'"):
        await open_agent("Absent")


@pytest.mark.long
async def test_samples_draw_numbers_of_their_own_and_a_resume_repeats_them(open_agent, class_file, tokenizer, play):
    async def draws(agent, seed):
        _, body = await play(agent, call("draw"), "Done.", seed=seed)
        return json.loads(body.sample.completion[1]["content"])

    first = [await draws(await open_agent("Draws"), seed) for seed in range(SAMPLES)]
    assert all(len(set(column)) == SAMPLES for column in zip(*first, strict=True))
    assert all(len(set(row)) == len(row) for row in first)
    assert [row[-1] for row in first] == list(range(SAMPLES))
    processes = AgentProcesses([EnvironmentClass(class_file, "Draws")])  # as after a restart
    _, body = await play(await open_agent("Draws"), call("order"), "Done.")
    try:
        resumed = await episodes.open_agent(processes, tokenizer)
        assert [await draws(resumed, seed) for seed in range(SAMPLES)] == first
        _, again = await play(resumed, call("order"), "Done.")
        assert again.sample.completion[1] == body.sample.completion[1]
    finally:
        await processes.close()
    _, body = await play(await open_agent("Draws"), call("draw"), "Done.", extra_info={"seed": 99})
    assert body.sample.completion[1]["content"].endswith(", 99]")


TORCH = """
import torch


class Torch:
    generator = torch.Generator()

    def reset(self, **columns):
        pass

    def draw(self) -> str:
        \"\"\"Draw.\"\"\"
        return str([torch.rand(1).item(), torch.rand(1, generator=self.generator).item()])
"""


@pytest.mark.engines
async def test_generators_of_torch_that_a_class_holds_begin_anew_in_each_sample(tmp_path, tokenizer, play) -> None:
    file = tmp_path / "uses_torch.py"
    file.write_text(TORCH)

    async def draws() -> list[list[float]]:
        processes = AgentProcesses([EnvironmentClass(str(file), "Torch", {}, 3, 120.0)])
        try:
            agent = await episodes.open_agent(processes, tokenizer, 120.0)
            bodies = [(await play(agent, call("draw"), "Done.", seed=seed))[1] for seed in range(2)]
            return [json.loads(body.sample.completion[1]["content"]) for body in bodies]
        finally:
            await processes.close()

    first = await draws()
    assert len({number for row in first for number in row}) == 4
    assert await draws() == first


LATE = """
import json, sys


class Late:
    turn = 0

    def __init__(self, env_config, extras={}):
        pass

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        late = self.turn > 0 or "numpy" not in sys.modules
        import numpy

        self.turn += 1
        drawn = json.dumps([late, float(numpy.random.rand())])
        return {"observations": [{"role": "user", "content": drawn}], "reward": 1.0, "done": action == "Done."}

    def close(self):
        pass
"""


@pytest.mark.long
async def test_libraries_that_an_environment_imports_late_draw_what_a_resume_repeats(tmp_path, tokenizer, play) -> None:
    file = tmp_path / "late.py"
    file.write_text(LATE)

    async def draws() -> list[list[float]]:
        processes = AgentProcesses([EnvironmentClass(str(file), "Late", {}, 3, 120.0)])
        try:
            agent = await episodes.open_agent(processes, tokenizer, 120.0)
            bodies = [(await play(agent, "go", "Done.", seed=seed))[1] for seed in range(2)]
            return [json.loads(body.sample.completion[1]["content"]) for body in bodies]
        finally:
            await processes.close()

    first = await draws()
    assert [late for late, _ in first] == [True, True]
    assert first[0] != first[1]
    assert await draws() == first


async def test_episodes_share_no_state(open_agent, play) -> None:
    agent = await open_agent("Counter", arguments={"step": 2})
    played = await asyncio.gather(*(play(agent, call("add", times=3), "Done.") for _ in range(3)))
    assert [body.sample.agent_reward for _, body in played] == [AgentReward("scored", 1.0)] * 3
