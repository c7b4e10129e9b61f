"""``python -m plaudit_workers.rollout``: one rollout worker of a job."""

from plaudit_workers import process
from plaudit_workers.rollout.worker import serve

if __name__ == "__main__":
    raise SystemExit(process.main(serve))
