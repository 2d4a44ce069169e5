"""The tables, as migrations that only go forward: entry n brings a database from version n to n + 1."""

from __future__ import annotations

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE files (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        filename TEXT NOT NULL,
        purpose TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        sha256 TEXT NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL
    );

    CREATE TABLE jobs (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        state TEXT NOT NULL
            CHECK (state IN ('validating_files', 'queued', 'running', 'succeeded', 'failed', 'cancelled')),
        model TEXT NOT NULL,
        training_file TEXT NOT NULL,
        validation_file TEXT,
        asked TEXT NOT NULL,
        spec TEXT,
        adapter_name TEXT NOT NULL,
        metadata TEXT NOT NULL,
        lease TEXT,
        worker TEXT,
        event_cursor INTEGER NOT NULL DEFAULT 0,
        cancel_requested INTEGER NOT NULL DEFAULT 0,
        restarts INTEGER NOT NULL DEFAULT 0,
        restart_step INTEGER NOT NULL DEFAULT 0,
        stalled_restarts INTEGER NOT NULL DEFAULT 0,
        step INTEGER NOT NULL DEFAULT 0,
        total_steps INTEGER,
        epoch REAL,
        trained_tokens INTEGER,
        tokens_per_s REAL,
        eta_s REAL,
        report TEXT,
        plan TEXT,
        error TEXT,
        adapter_version TEXT,
        created_at REAL NOT NULL,
        started_at REAL,
        finished_at REAL
    );
    CREATE INDEX jobs_by_state ON jobs (state);
    CREATE UNIQUE INDEX live_jobs_by_adapter_name ON jobs (adapter_name)
        WHERE state IN ('validating_files', 'queued', 'running');

    CREATE TABLE job_events (
        id TEXT PRIMARY KEY,
        job_id TEXT NOT NULL REFERENCES jobs (id),
        seq INTEGER NOT NULL,
        created_at REAL NOT NULL,
        level TEXT NOT NULL CHECK (level IN ('info', 'warn', 'error')),
        type TEXT NOT NULL CHECK (type IN ('message', 'metrics')),
        message TEXT NOT NULL,
        data TEXT,
        UNIQUE (job_id, seq)
    );

    CREATE TABLE job_metrics (
        job_id TEXT NOT NULL REFERENCES jobs (id),
        step INTEGER NOT NULL,
        data TEXT NOT NULL,
        PRIMARY KEY (job_id, step)
    );

    CREATE TABLE checkpoints (
        id TEXT PRIMARY KEY,
        job_id TEXT NOT NULL REFERENCES jobs (id),
        step INTEGER NOT NULL,
        path TEXT NOT NULL,
        version TEXT,
        metrics TEXT NOT NULL,
        created_at REAL NOT NULL,
        UNIQUE (job_id, step)
    );

    CREATE TABLE adapters (
        version TEXT PRIMARY KEY,
        base_model TEXT NOT NULL,
        rank INTEGER,
        parameters INTEGER,
        size_bytes INTEGER NOT NULL,
        job_id TEXT,
        created_at REAL NOT NULL
    );

    CREATE TABLE adapter_names (
        name TEXT PRIMARY KEY,
        version TEXT NOT NULL REFERENCES adapters (version),
        created_at REAL NOT NULL
    );
    CREATE INDEX adapter_names_by_version ON adapter_names (version);

    CREATE TABLE usage (
        name TEXT NOT NULL,
        version TEXT NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('chat', 'completion', 'training')),
        requests INTEGER NOT NULL DEFAULT 0,
        prompt_tokens INTEGER NOT NULL DEFAULT 0,
        completion_tokens INTEGER NOT NULL DEFAULT 0,
        trained_tokens INTEGER NOT NULL DEFAULT 0,
        updated_at REAL NOT NULL,
        PRIMARY KEY (name, version, kind)
    );

    CREATE TABLE workers (
        id TEXT PRIMARY KEY,
        base TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('starting', 'ready', 'failed', 'gone')),
        pid INTEGER,
        port INTEGER,
        error TEXT,
        created_at REAL NOT NULL,
        stopped_at REAL
    );

    CREATE TABLE idempotency (
        route TEXT NOT NULL,
        key TEXT NOT NULL,
        body_hash TEXT NOT NULL,
        response_id TEXT NOT NULL,
        created_at REAL NOT NULL,
        PRIMARY KEY (route, key)
    );
    """,
    """
    ALTER TABLE jobs ADD COLUMN result_file TEXT;
    """,
    """
    ALTER TABLE jobs ADD COLUMN pause_requested INTEGER NOT NULL DEFAULT 0;
    """,
    """
    ALTER TABLE jobs ADD COLUMN timing TEXT;
    """,
)
