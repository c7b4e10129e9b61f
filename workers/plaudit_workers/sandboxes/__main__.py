"""``python -m plaudit_workers.sandboxes``: the broker of a run's machines."""

from plaudit_workers import process
from plaudit_workers.sandboxes.server import serve

if __name__ == "__main__":
    raise SystemExit(process.main(serve))
