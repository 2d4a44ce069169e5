"""What the handlers of requests share."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from starlette.requests import Request

from tunerack.catalog.models import Catalogue
from tunerack.controller import Controller
from tunerack.monitor.metrics import HTTP_SECONDS, Histogram
from tunerack.settings import Settings
from tunerack.store.home import Store


@dataclass
class Services:
    """`stopping` is set when the process has been told to end, so that open answers end with an error event."""

    settings: Settings
    store: Store
    controller: Controller
    catalogue: Catalogue
    http_seconds: Histogram = field(default_factory=lambda: Histogram(HTTP_SECONDS))
    started_at: float = field(default_factory=time.time)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


def services_of(request: Request) -> Services:
    found: Services = request.app.state.services
    return found
