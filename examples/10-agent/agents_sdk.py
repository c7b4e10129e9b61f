"""A program with the OpenAI Agents SDK: it asks for the weather with a tool. Nothing in it knows of Plaudit.

It reads a question from standard input and prints its answer; the last line is the reward.
"""

import json
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

WEATHER = {"Oslo": "4 degrees, rain", "Rome": "21 degrees, sun"}


@function_tool
def weather(city: str) -> str:
    """Return the present weather of a city."""
    return WEATHER.get(city, "unknown")


def main() -> None:
    """Answer one question."""
    set_default_openai_api("chat_completions")
    set_tracing_disabled(True)
    row = json.load(sys.stdin)
    agent = Agent(
        name="Forecaster",
        instructions="Answer with the temperature only.",
        tools=[weather],
        model=os.environ["OPENAI_MODEL"],
    )
    answer = Runner.run_sync(agent, row["messages"][-1]["content"]).final_output
    print(answer)
    print(json.dumps({"reward": float(row["ground_truth"] in answer)}))


if __name__ == "__main__":
    main()
