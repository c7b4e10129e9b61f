"""The same with smolagents: its agent ends by calling ``final_answer``. Nothing in it knows of Plaudit.

It reads a question from standard input and prints its answer; the last line is the reward.
"""

import json
import os
import sys

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool

WEATHER = {"Oslo": "4 degrees, rain", "Rome": "21 degrees, sun"}


@tool
def weather(city: str) -> str:
    """Return the present weather of a city.

    Args:
        city: its name
    """
    return WEATHER.get(city, "unknown")


def main() -> None:
    """Answer one question."""
    row = json.load(sys.stdin)
    model = OpenAIServerModel(
        model_id=os.environ["OPENAI_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    agent = ToolCallingAgent(tools=[weather], model=model, max_steps=4, verbosity_level=LogLevel.ERROR)
    answer = str(agent.run(row["messages"][-1]["content"]))
    print(answer)
    print(json.dumps({"reward": float(row["ground_truth"] in answer)}))


if __name__ == "__main__":
    main()
