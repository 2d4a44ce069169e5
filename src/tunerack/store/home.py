"""Everything that is stored in one home folder."""

from __future__ import annotations

import logging

from tunerack.settings import Settings
from tunerack.store.adapters import Adapters
from tunerack.store.checkpoints import Checkpoints
from tunerack.store.database import Database
from tunerack.store.disk import sweep
from tunerack.store.events import Events
from tunerack.store.files import Files
from tunerack.store.jobs import Jobs
from tunerack.store.timings import Timings
from tunerack.store.usage import UsageCounters
from tunerack.store.workers import Workers

log = logging.getLogger(__name__)


class Store:
    """The tables of `tunerack.db`, and the folders that belong to their rows."""

    def __init__(self, settings: Settings) -> None:
        for folder in (
            settings.home,
            settings.files,
            settings.jobs,
            settings.adapters,
            settings.logs,
            settings.workers,
        ):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.settings = settings
        self.database = Database(settings.database)
        self.files = Files(self.database)
        self.jobs = Jobs(self.database)
        self.events = Events(self.database)
        self.checkpoints = Checkpoints(self.database)
        self.adapters = Adapters(self.database)
        self.usage = UsageCounters(self.database)
        self.workers = Workers(self.database)
        self.timings = Timings(self.database)

    def sweep(self) -> None:
        """Remove files and adapter folders without a row: nobody was told of them. Only while no one else writes."""
        for folder, known in (
            (self.settings.files, self.files.ids()),
            (self.settings.adapters, self.adapters.versions()),
        ):
            for name in sweep(folder, known):
                log.info("removed %s/%s, which a stopped process had left unfinished", folder.name, name)

    def close(self) -> None:
        self.database.close()
