"""Run environments in the forms of TRL, SkyRL, verl, OpenEnv and NeMo Gym, behind one protocol."""
