"""``python -m plaudit_workers.scoring``: one reward worker of a job."""

from plaudit_workers import process
from plaudit_workers.service.worker import serve

if __name__ == "__main__":
    raise SystemExit(process.main(serve))
