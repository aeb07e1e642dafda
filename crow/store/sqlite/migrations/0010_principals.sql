-- A session belongs to a principal: somebody who connects to `crow serve` with a token. NULL is the local user. Aliases
-- are unique for each principal, not in the whole database. The old table cannot lose its UNIQUE, so it is made anew.
CREATE TABLE old_sessions AS SELECT * FROM sessions;
CREATE TABLE old_sequence AS SELECT seq FROM sqlite_sequence WHERE name = 'sessions';
DROP TABLE sessions;

-- The only mutable rows. `id` is the client's for ever; `number` names the row in the full-text index (as -number).
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    conversation INTEGER NOT NULL,
    leaf INTEGER,
    forked_from TEXT,
    parent_id TEXT,
    alias TEXT,
    cwd TEXT NOT NULL,
    additional_directories TEXT NOT NULL DEFAULT '[]',
    title TEXT,
    title_by_user INTEGER NOT NULL DEFAULT 0,
    model TEXT NOT NULL,
    mode TEXT NOT NULL,
    permissions TEXT NOT NULL DEFAULT '[]',
    config TEXT NOT NULL DEFAULT '{}',
    metadata TEXT NOT NULL DEFAULT '{}',
    calibration REAL NOT NULL DEFAULT 1.0,
    entries INTEGER NOT NULL DEFAULT 0,
    tokens_in INTEGER NOT NULL DEFAULT 0,
    tokens_out INTEGER NOT NULL DEFAULT 0,
    tokens_cached INTEGER NOT NULL DEFAULT 0,
    cost REAL NOT NULL DEFAULT 0.0,
    files_changed INTEGER NOT NULL DEFAULT 0,
    lines_added INTEGER NOT NULL DEFAULT 0,
    lines_removed INTEGER NOT NULL DEFAULT 0,
    newest_entry INTEGER NOT NULL DEFAULT 0,
    has_prompt INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT 'idle' CHECK (state IN ('idle', 'running')),
    owner TEXT NOT NULL DEFAULT '',
    lease_ms INTEGER NOT NULL DEFAULT 0,
    turn INTEGER NOT NULL DEFAULT 0,
    created_ms INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL,
    archived INTEGER NOT NULL DEFAULT 0,
    deleted_ms INTEGER,
    principal TEXT CHECK (principal <> ''),
    session_id TEXT GENERATED ALWAYS AS (id) VIRTUAL,
    workspace_path TEXT GENERATED ALWAYS AS (cwd) VIRTUAL,
    created_at TEXT GENERATED ALWAYS AS (datetime(created_ms / 1000, 'unixepoch')) VIRTUAL,
    updated_at TEXT GENERATED ALWAYS AS (datetime(updated_ms / 1000, 'unixepoch')) VIRTUAL
);
INSERT INTO sessions (
    number, id, conversation, leaf, forked_from, parent_id, alias, cwd, additional_directories, title, title_by_user,
    model, mode, permissions, config, metadata, calibration, entries, tokens_in, tokens_out, tokens_cached, cost,
    files_changed, lines_added, lines_removed, newest_entry, has_prompt, state, owner, lease_ms, turn, created_ms,
    updated_ms, archived, deleted_ms
)
SELECT
    number, id, conversation, leaf, forked_from, parent_id, alias, cwd, additional_directories, title, title_by_user,
    model, mode, permissions, config, metadata, calibration, entries, tokens_in, tokens_out, tokens_cached, cost,
    files_changed, lines_added, lines_removed, newest_entry, has_prompt, state, owner, lease_ms, turn, created_ms,
    updated_ms, archived, deleted_ms
FROM old_sessions;
-- No number may be used twice, not even that of a session that was removed.
DELETE FROM sqlite_sequence WHERE name = 'sessions';
INSERT INTO sqlite_sequence (name, seq) SELECT 'sessions', seq FROM old_sequence;
DROP TABLE old_sessions;
DROP TABLE old_sequence;

CREATE INDEX sessions_listed ON sessions (archived, newest_entry, id)
    WHERE has_prompt = 1 AND parent_id IS NULL AND deleted_ms IS NULL;
CREATE INDEX sessions_listed_by_cwd ON sessions (cwd, archived, newest_entry, id)
    WHERE has_prompt = 1 AND parent_id IS NULL AND deleted_ms IS NULL;
CREATE INDEX sessions_of_principal ON sessions (principal, archived, newest_entry, id)
    WHERE principal IS NOT NULL AND has_prompt = 1 AND parent_id IS NULL AND deleted_ms IS NULL;
CREATE INDEX sessions_by_parent ON sessions (parent_id) WHERE parent_id IS NOT NULL;
CREATE INDEX sessions_by_conversation ON sessions (conversation);
CREATE INDEX sessions_deleted ON sessions (conversation) WHERE deleted_ms IS NOT NULL;
CREATE INDEX sessions_by_search_id ON sessions (-number) WHERE title IS NOT NULL;
CREATE UNIQUE INDEX sessions_by_alias ON sessions (coalesce(principal, ''), alias) WHERE alias IS NOT NULL;

-- Sessions that other principals may read, or read and write. The sub-agents of a shared session have rows of their own.
CREATE TABLE shares (
    principal TEXT NOT NULL CHECK (principal <> ''),
    session TEXT NOT NULL,
    access TEXT NOT NULL CHECK (access IN ('read', 'write')),
    created_ms INTEGER NOT NULL,
    PRIMARY KEY (principal, session)
) WITHOUT ROWID;
CREATE INDEX shares_by_session ON shares (session);
CREATE TRIGGER shares_go_with_their_session AFTER DELETE ON sessions
BEGIN
    DELETE FROM shares WHERE session = OLD.id;
END;

-- Tokens for `crow serve`. `hash` is the sha256 (hex) of the secret, which is stored nowhere. Times are Unix milliseconds.
CREATE TABLE tokens (
    id TEXT PRIMARY KEY,
    principal TEXT NOT NULL CHECK (principal <> ''),
    label TEXT NOT NULL DEFAULT '',
    hash TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    expires_ms INTEGER,
    used_ms INTEGER,
    revoked_ms INTEGER
) WITHOUT ROWID;
