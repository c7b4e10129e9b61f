"""The processes of a job: rollout, scoring and training, the streams that join them, and what starts them."""


def plaudit() -> int:
    """Run the program ``plaudit``. Return its exit code, also after Ctrl-C while the program is still imported."""
    try:
        from plaudit_workers.cli import main

        return main()
    except KeyboardInterrupt:
        return 130  # EXIT_INTERRUPTED, whose own import this may be
