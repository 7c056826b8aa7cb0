"""Makes writes that can't be undone safe to retry: Flask, Redis, and a relational database."""

from .errors import NothingHappened, SagaFailed, TransientStepError
from .notes import Notes
from .providers import Provider
from .records import Settlement
from .sagas import Saga
from .settling import Orphan
from .web.current import current_idempotency
from .web.extension import Idempotent
from .web.views import idempotent

__all__ = [
    "Idempotent",
    "Notes",
    "NothingHappened",
    "Orphan",
    "Provider",
    "Saga",
    "SagaFailed",
    "Settlement",
    "TransientStepError",
    "current_idempotency",
    "idempotent",
]
