"""An environment in TRL's form (``environment_factory``): a lamp shows a number, and the model presses a button."""


class Lamp:
    """A lamp with buttons."""

    def reset(self, answer: str, **kwargs) -> str:
        """Show the number; it is appended to the prompt."""
        self.number = int(answer)
        self.pressed = None
        return str(self.number)

    def press(self, button: int) -> str:
        """Press a button.

        Args:
            button: number of the button
        """
        self.pressed = button
        return "1" if button == self.number else "0"

    def get_reward(self):
        """Return 1 for the right button, 0.1 for another one."""
        if self.pressed is None:
            return 0.0
        return 1.0 if self.pressed == self.number else 0.1
