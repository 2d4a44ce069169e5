"""The application: every route, behind one gate."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from tunerack.api import adapters, files, generation, health, jobs, models, usage
from tunerack.api.bases import default_base
from tunerack.api.errors import on_http_error, on_tunerack_error
from tunerack.api.requests import Gate
from tunerack.api.services import Services
from tunerack.controller import Controller
from tunerack.errors import TunerackError
from tunerack.executors.executor import Executor
from tunerack.executors.local import LocalExecutor
from tunerack.schedule.snapshot import Limits
from tunerack.settings import Settings
from tunerack.store.home import Store


def create_app(
    settings: Settings,
    *,
    executor: Executor | None = None,
    default_model: str | None = None,
    limits: Limits | None = None,
) -> Starlette:
    """The control process as an ASGI application; its lifespan starts and stops the controller and the workers.

    executor: where workers run; this machine when None
    default_model: base that is loaded at once, and that a loaded adapter is taken to be for; see `default_base`
    """
    catalogue, default_base_name = default_base(settings, default_model)
    store = Store(settings)
    controller = Controller(
        store, executor or LocalExecutor(settings), catalogue, default_model=default_base_name, limits=limits
    )
    services = Services(settings, store, controller, catalogue)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await controller.start()
        try:
            yield
        finally:
            services.stopping.set()
            await controller.close()
            store.close()

    nouns = (files, jobs, models, generation, adapters, usage, health)
    app = Starlette(
        routes=[route for noun in nouns for route in noun.ROUTES],
        middleware=[Middleware(Gate, services=services)],
        exception_handlers={TunerackError: on_tunerack_error, HTTPException: on_http_error},
        lifespan=lifespan,
    )
    app.state.services = services
    return app
