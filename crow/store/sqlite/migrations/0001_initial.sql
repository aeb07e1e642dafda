-- Conversations are trees of entries; a session is a pointer into one.
CREATE TABLE conversations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    created_ms INTEGER NOT NULL
);

-- The only mutable rows. `id` is the client's for ever; `number` names the row in the full-text index (as -number).
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    conversation INTEGER NOT NULL,
    leaf INTEGER,
    forked_from TEXT,
    parent_id TEXT,
    alias TEXT UNIQUE,
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
    deleted_ms INTEGER
);
CREATE INDEX sessions_listed ON sessions (archived, newest_entry, id)
    WHERE has_prompt = 1 AND parent_id IS NULL AND deleted_ms IS NULL;
CREATE INDEX sessions_listed_by_cwd ON sessions (cwd, archived, newest_entry, id)
    WHERE has_prompt = 1 AND parent_id IS NULL AND deleted_ms IS NULL;
CREATE INDEX sessions_by_parent ON sessions (parent_id) WHERE parent_id IS NOT NULL;
CREATE INDEX sessions_by_conversation ON sessions (conversation);
CREATE INDEX sessions_deleted ON sessions (conversation) WHERE deleted_ms IS NOT NULL;

-- Insert-only. `body` is JSON; one over 32 KiB is the blob `body_blob` instead. `call_entry` and `call_index` say which
-- call a started, file or tool entry belongs to.
CREATE TABLE entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation INTEGER NOT NULL,
    session TEXT NOT NULL,
    parent INTEGER,
    turn INTEGER NOT NULL,
    kind TEXT NOT NULL,
    model TEXT NOT NULL DEFAULT '',
    body TEXT,
    body_blob TEXT,
    call_entry INTEGER,
    call_index INTEGER,
    input_tokens INTEGER,
    output_tokens INTEGER,
    cached_tokens INTEGER,
    reasoning_tokens INTEGER,
    cost REAL,
    estimate INTEGER,
    created_ms INTEGER NOT NULL,
    CHECK ((body IS NULL) <> (body_blob IS NULL)),
    CHECK (parent < id)
);
CREATE INDEX entries_by_conversation ON entries (conversation, parent);
CREATE INDEX entries_by_session ON entries (session);
CREATE INDEX entries_results ON entries (call_entry, call_index) WHERE kind = 'tool';
CREATE TRIGGER entries_never_change BEFORE UPDATE ON entries
BEGIN
    SELECT RAISE(ABORT, 'entries never change');
END;

-- Prompts that wait for their turn; images are inline. `owner` is the process that put it there.
CREATE TABLE inbox (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    session TEXT NOT NULL,
    owner TEXT NOT NULL,
    message_id TEXT NOT NULL,
    parts TEXT NOT NULL,
    created_ms INTEGER NOT NULL
);
CREATE INDEX inbox_by_session ON inbox (session);

-- Pieces of the running stream.
CREATE TABLE drafts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    session TEXT NOT NULL,
    after_leaf INTEGER,
    turn INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    text TEXT NOT NULL,
    thought TEXT NOT NULL,
    created_ms INTEGER NOT NULL
);
CREATE INDEX drafts_by_session ON drafts (session);

-- Insert-only: where a session stood before somebody moved it.
CREATE TABLE moves (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    session TEXT NOT NULL,
    from_leaf INTEGER,
    to_leaf INTEGER,
    reason TEXT NOT NULL,
    created_ms INTEGER NOT NULL
);
CREATE INDEX moves_by_session ON moves (session);

-- `hash` is the sha256 (hex) of `data`.
CREATE TABLE blobs (
    hash TEXT PRIMARY KEY,
    size INTEGER NOT NULL,
    data BLOB NOT NULL
);
CREATE TABLE blob_refs (
    blob TEXT NOT NULL,
    entry INTEGER NOT NULL,
    PRIMARY KEY (blob, entry)
) WITHOUT ROWID;
CREATE INDEX blob_refs_by_entry ON blob_refs (entry);

-- What was learned about an endpoint: a JSON object.
CREATE TABLE endpoints (
    base_url TEXT NOT NULL,
    model TEXT NOT NULL,
    learned TEXT NOT NULL DEFAULT '{}',
    PRIMARY KEY (base_url, model)
) WITHOUT ROWID;

-- Every entry with its body as JSON, wherever it is kept; NULL if it is damaged.
CREATE VIEW entry_bodies AS
SELECT e.id, e.conversation, e.session, e.parent, e.turn, e.kind, e.model,
    CASE WHEN json_valid(coalesce(e.body, CAST(b.data AS TEXT))) THEN coalesce(e.body, CAST(b.data AS TEXT)) END AS body,
    e.input_tokens, e.output_tokens, e.cached_tokens, e.reasoning_tokens, e.cost, e.estimate,
    strftime('%Y-%m-%dT%H:%M:%fZ', e.created_ms / 1000.0, 'unixepoch') AS created
FROM entries e LEFT JOIN blobs b ON b.hash = e.body_blob;

-- What the full-text index holds: entries by id, titles by -number. The index stores no text of its own.
CREATE VIEW searchable (id, text) AS
SELECT id, json_extract(body, '$.text') FROM entry_bodies WHERE kind = 'assistant'
UNION ALL
SELECT id, (
    SELECT group_concat(json_extract(part.value, '$.text'), char(10)) FROM json_each(body, '$.parts') part
    WHERE json_extract(part.value, '$.type') = 'text'
) FROM entry_bodies WHERE kind = 'user'
UNION ALL
SELECT -number, title FROM sessions WHERE title IS NOT NULL;
CREATE VIRTUAL TABLE entries_fts USING fts5(text, content='searchable', content_rowid='id', tokenize='trigram');

CREATE VIEW messages AS
SELECT id, session, conversation, parent, turn, 'user' AS role,
    (SELECT group_concat(json_extract(part.value, '$.text'), char(10)) FROM json_each(body, '$.parts') part
     WHERE json_extract(part.value, '$.type') = 'text') AS content,
    NULL AS thought, NULL AS tool_calls, model, created
FROM entry_bodies WHERE kind = 'user'
UNION ALL
SELECT id, session, conversation, parent, turn, 'assistant', json_extract(body, '$.text'),
    nullif(json_extract(body, '$.thought'), ''), nullif(json_extract(body, '$.calls'), '[]'), model, created
FROM entry_bodies WHERE kind = 'assistant'
UNION ALL
SELECT id, session, conversation, parent, turn, 'tool', json_extract(body, '$.text'), NULL, NULL, model, created
FROM entry_bodies WHERE kind = 'tool';

-- One row per call; result, success and duration_ms are NULL for a call that has no result.
CREATE VIEW tool_calls AS
SELECT a.id AS assistant, call.key AS call_index, a.session, a.turn,
    json_extract(call.value, '$.name') AS name, json_extract(call.value, '$.arguments') AS args,
    json_extract(r.body, '$.text') AS result, NOT json_extract(r.body, '$.is_error') AS success,
    json_extract(r.body, '$.duration_ms') AS duration_ms, t.id AS result_entry, a.created
FROM entry_bodies a JOIN json_each(a.body, '$.calls') call
LEFT JOIN entries t ON t.kind = 'tool' AND t.call_entry = a.id AND t.call_index = call.key
LEFT JOIN entry_bodies r ON r.id = t.id
WHERE a.kind = 'assistant';

-- Checkpoints and masks; `restored` is 1 when one no longer counts on some branch.
CREATE VIEW compaction_history AS
SELECT c.id, c.session, c.kind, json_extract(c.body, '$.reason') AS reason, json_extract(c.body, '$.method') AS method,
    coalesce(json_extract(c.body, '$.first_kept'), json_extract(c.body, '$.before')) AS first_kept,
    json_extract(c.body, '$.tokens_before') AS tokens_before, json_extract(c.body, '$.tokens_after') AS tokens_after,
    json_extract(c.body, '$.model_calls') AS model_calls, json_extract(c.body, '$.summary') AS summary,
    EXISTS (SELECT 1 FROM entry_bodies r WHERE r.conversation = c.conversation AND r.kind = 'restore'
            AND json_extract(r.body, '$.entry') = c.id) AS restored,
    c.model, c.created
FROM entry_bodies c WHERE c.kind IN ('checkpoint', 'mask');

CREATE VIEW session_skills AS
SELECT session, json_extract(body, '$.name') AS name, min(id) AS first_entry, count(*) AS times, min(created) AS created
FROM entry_bodies WHERE kind = 'skill' GROUP BY session, json_extract(body, '$.name');

-- Sums by session, model and day (UTC); an entry counts once, however many forks share it.
CREATE VIEW usage AS
SELECT session, model, date(created_ms / 1000, 'unixepoch') AS day, count(*) AS requests,
    sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens, sum(cached_tokens) AS cached_tokens,
    sum(reasoning_tokens) AS reasoning_tokens, sum(cost) AS cost
FROM entries
WHERE input_tokens IS NOT NULL OR output_tokens IS NOT NULL OR cost IS NOT NULL
GROUP BY session, model, day;
