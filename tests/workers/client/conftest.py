from scoring_service import start_service

__all__ = ["start_service"]
