-- The names that people expect in a SQL shell. All times below are UTC, in the form that datetime() returns, so that
-- they can be compared with it.
ALTER TABLE sessions ADD COLUMN session_id TEXT GENERATED ALWAYS AS (id) VIRTUAL;
ALTER TABLE sessions ADD COLUMN workspace_path TEXT GENERATED ALWAYS AS (cwd) VIRTUAL;
ALTER TABLE sessions ADD COLUMN created_at TEXT GENERATED ALWAYS AS (datetime(created_ms / 1000, 'unixepoch')) VIRTUAL;
ALTER TABLE sessions ADD COLUMN updated_at TEXT GENERATED ALWAYS AS (datetime(updated_ms / 1000, 'unixepoch')) VIRTUAL;

-- Few entries are of these kinds. Without these indexes, the views below read all entries.
CREATE INDEX entries_compactions ON entries (session) WHERE kind IN ('checkpoint', 'mask');
CREATE INDEX entries_restores ON entries (conversation) WHERE kind = 'restore';
CREATE INDEX entries_skills ON entries (session) WHERE kind = 'skill';
CREATE INDEX entries_files ON entries (session) WHERE kind = 'file';

DROP VIEW messages;
DROP VIEW tool_calls;
DROP VIEW compaction_history;
DROP VIEW session_skills;
DROP VIEW usage;

-- The sessions that crow lists, newest first. `message_count` counts the prompts and answers on the session's path.
CREATE VIEW session_list AS
SELECT s.id AS session_id, s.title, s.created_at, s.updated_at, s.workspace_path,
    (WITH RECURSIVE path (id, parent, kind) AS (
        SELECT e.id, e.parent, e.kind FROM entries e WHERE e.id = s.leaf
        UNION ALL
        SELECT e.id, e.parent, e.kind FROM path JOIN entries e ON e.id = path.parent WHERE e.id < path.id
     )
     SELECT count(*) FROM path WHERE kind IN ('user', 'assistant')) AS message_count,
    s.model, s.mode, s.state, s.tokens_in, s.tokens_out, s.tokens_cached, s.cost,
    s.files_changed, s.lines_added, s.lines_removed, s.archived, s.alias, s.forked_from, s.metadata
FROM sessions s
WHERE s.has_prompt = 1 AND s.parent_id IS NULL AND s.deleted_ms IS NULL
ORDER BY s.newest_entry DESC;

-- Prompts, answers and tool results. `tool_call_id` and `tool_name` are set for results only.
CREATE VIEW messages AS
SELECT m.id, m.session, m.conversation, m.parent, m.turn, m.kind AS role,
    CASE m.kind
        WHEN 'user' THEN (
            SELECT group_concat(json_extract(part.value, '$.text'), char(10)) FROM json_each(m.body, '$.parts') part
            WHERE json_extract(part.value, '$.type') = 'text'
        )
        ELSE json_extract(m.body, '$.text')
    END AS content,
    CASE m.kind WHEN 'assistant' THEN nullif(json_extract(m.body, '$.thought'), '') END AS thought,
    CASE m.kind WHEN 'assistant' THEN nullif(json_extract(m.body, '$.calls'), '[]') END AS tool_calls,
    m.model, m.created,
    m.session AS session_id,
    CASE m.kind WHEN 'tool' THEN
        'call_' || json_extract(m.body, '$.call.assistant') || '_' || json_extract(m.body, '$.call.index')
    END AS tool_call_id,
    CASE m.kind WHEN 'tool' THEN json_extract(m.body, '$.name') END AS tool_name,
    m.input_tokens, m.output_tokens, m.cost,
    replace(substr(m.created, 1, 23), 'T', ' ') AS timestamp,
    replace(substr(m.created, 1, 23), 'T', ' ') AS created_at
FROM entry_bodies m
WHERE m.kind IN ('user', 'assistant', 'tool');

-- One row per call. `tool_call_id` is the id that the editor sees; it is unique. `tool_result`, `success` and
-- `duration_ms` are NULL for a call that has no result.
CREATE VIEW tool_calls AS
SELECT a.id AS assistant, call.key AS call_index, a.session, a.turn,
    json_extract(call.value, '$.name') AS name,
    json_extract(call.value, '$.arguments') AS args,
    (SELECT json_extract(b.body, '$.text') FROM entry_bodies b WHERE b.id = r.id) AS result,
    (SELECT NOT json_extract(b.body, '$.is_error') FROM entry_bodies b WHERE b.id = r.id) AS success,
    (SELECT json_extract(b.body, '$.duration_ms') FROM entry_bodies b WHERE b.id = r.id) AS duration_ms,
    r.id AS result_entry, a.created,
    'call_' || a.id || '_' || call.key AS tool_call_id,
    a.session AS session_id,
    a.id AS message_id,
    json_extract(call.value, '$.name') AS tool_name,
    json_extract(call.value, '$.arguments') AS tool_args,
    (SELECT json_extract(b.body, '$.text') FROM entry_bodies b WHERE b.id = r.id) AS tool_result,
    a.model,
    replace(substr(a.created, 1, 23), 'T', ' ') AS timestamp,
    replace(substr(a.created, 1, 23), 'T', ' ') AS created_at
FROM entry_bodies a
JOIN json_each(a.body, '$.calls') call
LEFT JOIN entries r ON r.kind = 'tool' AND r.call_entry = a.id AND r.call_index = call.key
WHERE a.kind = 'assistant';

-- Checkpoints and masks. `restored` is 1 when one no longer counts on some branch. `before_message_count` and
-- `after_message_count` say how many messages (prompts, answers, tool results, a summary) the model saw before and
-- after a checkpoint. They are NULL for a mask, which hides old tool results but keeps all messages.
CREATE VIEW compaction_history AS
SELECT c.id, c.session, c.kind, json_extract(c.body, '$.reason') AS reason, json_extract(c.body, '$.method') AS method,
    coalesce(json_extract(c.body, '$.first_kept'), json_extract(c.body, '$.before')) AS first_kept,
    json_extract(c.body, '$.tokens_before') AS tokens_before, json_extract(c.body, '$.tokens_after') AS tokens_after,
    json_extract(c.body, '$.model_calls') AS model_calls, json_extract(c.body, '$.summary') AS summary,
    EXISTS (
        SELECT 1 FROM entry_bodies r WHERE r.conversation = c.conversation AND r.kind = 'restore'
        AND json_extract(r.body, '$.entry') = c.id
    ) AS restored,
    c.model, c.created,
    c.session AS session_id,
    CASE c.kind WHEN 'checkpoint' THEN (
        -- `floor` is the first entry that the previous checkpoint of this path kept.
        WITH RECURSIVE path (id, parent, kind, floor) AS (
            SELECT e.id, e.parent, e.kind, NULL FROM entries e WHERE e.id = c.parent
            UNION ALL
            SELECT e.id, e.parent, e.kind, CASE
                WHEN path.floor IS NULL AND path.kind = 'checkpoint' AND NOT EXISTS (
                    SELECT 1 FROM entry_bodies r WHERE r.conversation = c.conversation AND r.kind = 'restore'
                    AND r.id < c.id AND json_extract(r.body, '$.entry') = path.id
                ) THEN (
                    SELECT coalesce(json_extract(p.body, '$.first_kept'), p.id) FROM entry_bodies p WHERE p.id = path.id
                )
                ELSE path.floor
            END AS floor
            FROM path JOIN entries e ON e.id = path.parent
            WHERE e.id < path.id AND path.id > coalesce(path.floor, 0)
        )
        SELECT sum(kind IN ('user', 'assistant', 'tool') AND id >= coalesce(floor, 0)) + (max(floor) IS NOT NULL)
        FROM path
    ) END AS before_message_count,
    CASE c.kind WHEN 'checkpoint' THEN (
        WITH RECURSIVE path (id, parent, kind) AS (
            SELECT e.id, e.parent, e.kind FROM entries e
            WHERE e.id = c.parent AND e.id >= json_extract(c.body, '$.first_kept')
            UNION ALL
            SELECT e.id, e.parent, e.kind FROM path JOIN entries e ON e.id = path.parent
            WHERE e.id < path.id AND e.id >= json_extract(c.body, '$.first_kept')
        )
        SELECT count(*) + 1 FROM path WHERE kind IN ('user', 'assistant', 'tool')
    ) END AS after_message_count,
    replace(substr(c.created, 1, 23), 'T', ' ') AS timestamp,
    replace(substr(c.created, 1, 23), 'T', ' ') AS created_at
FROM entry_bodies c
WHERE c.kind IN ('checkpoint', 'mask');

-- The skills that each session loaded. `skill_content` is the text of the last time.
CREATE VIEW session_skills AS
SELECT s.session, s.name, s.first_entry, s.times, s.created,
    s.session AS session_id,
    s.name AS skill_name,
    json_extract(newest.body, '$.text') AS skill_content,
    replace(substr(s.created, 1, 23), 'T', ' ') AS timestamp,
    replace(substr(s.created, 1, 23), 'T', ' ') AS created_at
FROM (
    SELECT session, json_extract(body, '$.name') AS name, min(id) AS first_entry, max(id) AS last_entry,
        count(*) AS times, min(created) AS created
    FROM entry_bodies WHERE kind = 'skill'
    GROUP BY session, json_extract(body, '$.name')
) s
JOIN entry_bodies newest ON newest.id = s.last_entry;

-- Sums by session, model and day (UTC). An entry counts once, however many forks share it. The usage of a sub-agent
-- counts for its own session (`sessions.parent_id` names the session that started it).
CREATE VIEW usage AS
SELECT session, model, date(created_ms / 1000, 'unixepoch') AS day, count(*) AS requests,
    sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens, sum(cached_tokens) AS cached_tokens,
    sum(reasoning_tokens) AS reasoning_tokens, sum(cost) AS cost,
    session AS session_id
FROM entries
WHERE kind <> 'tool' AND (input_tokens IS NOT NULL OR output_tokens IS NOT NULL OR cost IS NOT NULL)
GROUP BY session, model, day;
