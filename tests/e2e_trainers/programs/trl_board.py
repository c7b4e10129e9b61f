"""An environment in TRL's form: a number that grows to its goal, with public attributes for reward functions."""


class Board:
    """A number and its goal."""

    limit = 3

    def reset(self, answer: str, **kwargs) -> str:
        """Begin at 0; what is returned is appended to the prompt."""
        self.goal = int(answer)
        self.value = 0
        self.moves = []
        self.reward = None
        self._secret = object()
        return f" Reach {self.goal} within {self.limit} moves."

    def add(self, number: int, note: str = "") -> str:
        """Add a number.

        Args:
            number: what to add
            note: any text, such as "half" or ä
        """
        self.value += number
        self.moves.append({"number": number, "note": note})
        return f"value: {self.value}"

    def look(self) -> dict:
        """Look at the board."""
        return {"value": self.value, "goal": self.goal}

    def get_reward(self) -> float:
        """Return 1 at the goal, else the share of it."""
        self.reward = 1.0 if self.value == self.goal else self.value / self.goal / 2
        return self.reward
