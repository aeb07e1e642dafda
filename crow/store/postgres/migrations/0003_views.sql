-- Views for people, with the names of those in the SQLite file. Times are of type timestamptz.

-- Few entries are of these kinds. Without this index, the views below would read all entries.
CREATE INDEX entries_rare ON crow.entries (kind, conversation)
    WHERE kind IN ('checkpoint', 'mask', 'restore', 'skill', 'file');

CREATE FUNCTION crow.time_of(ms bigint) RETURNS timestamptz LANGUAGE sql IMMUTABLE AS $$
    SELECT to_timestamp(ms / 1000.0)
$$;

-- The text of a blob. Bytes that a text cannot hold are written as octal escapes, and so is everything else then.
CREATE FUNCTION crow.text_of(data bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN convert_from(data, 'UTF8');
EXCEPTION WHEN data_exception THEN
    RETURN encode(data, 'escape');
END
$$;

-- The body of an entry; NULL if it is not JSON. A text of PostgreSQL cannot hold the character NUL.
CREATE FUNCTION crow.body_of(body text, data bytea) RETURNS json LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN replace(coalesce(body, crow.text_of(data)), '\u0000', '\ufffd')::json;
EXCEPTION WHEN data_exception THEN
    RETURN NULL;
END
$$;

CREATE VIEW crow.entry_bodies AS
SELECT e.id, e.conversation, e.session, e.parent, e.turn, e.kind, e.model, crow.body_of(e.body, b.data) AS body,
    e.input_tokens, e.output_tokens, e.cached_tokens, e.reasoning_tokens, e.cost, e.estimate,
    crow.time_of(e.created_ms) AS created_at
FROM crow.entries e LEFT JOIN crow.blobs b ON b.hash = e.body_blob;

-- The sessions that crow lists, newest first. `message_count` counts the prompts and answers on the session's path.
CREATE VIEW crow.session_list AS
SELECT s.id AS session_id, s.title, crow.time_of(s.created_ms) AS created_at, crow.time_of(s.updated_ms) AS updated_at,
    s.cwd AS workspace_path,
    (
        WITH RECURSIVE path (id, parent, kind) AS (
            SELECT e.id, e.parent, e.kind FROM crow.entries e WHERE e.id = s.leaf
            UNION ALL
            SELECT e.id, e.parent, e.kind FROM path JOIN crow.entries e ON e.id = path.parent
        )
        SELECT count(*) FROM path WHERE kind IN ('user', 'assistant')
    ) AS message_count,
    s.model, s.mode, s.state, s.tokens_in, s.tokens_out, s.tokens_cached, s.cost,
    s.files_changed, s.lines_added, s.lines_removed, s.archived, s.alias, s.forked_from, s.principal,
    crow.body_of(s.metadata, NULL) AS metadata
FROM crow.sessions s
WHERE s.has_prompt AND s.parent_id IS NULL AND s.deleted_ms IS NULL
ORDER BY s.newest_entry DESC;

-- Prompts, answers and tool results. `tool_call_id` and `tool_name` are set for results only.
CREATE VIEW crow.messages AS
SELECT m.id, m.session AS session_id, m.conversation, m.parent, m.turn, m.kind AS role,
    CASE
        WHEN m.kind = 'user' THEN (
            SELECT string_agg(part ->> 'text', E'\n') FROM json_array_elements(m.body -> 'parts') AS p (part)
            WHERE part ->> 'type' = 'text'
        )
        WHEN json_typeof(m.body -> 'text') = 'object' THEN (
            SELECT crow.text_of(b.data) FROM crow.blobs b WHERE b.hash = m.body -> 'text' ->> 'blob'
        )
        ELSE m.body ->> 'text'
    END AS content,
    CASE m.kind WHEN 'assistant' THEN nullif(m.body ->> 'thought', '') END AS thought,
    CASE WHEN m.kind = 'assistant' AND json_array_length(m.body -> 'calls') > 0 THEN m.body -> 'calls' END AS tool_calls,
    CASE m.kind WHEN 'tool' THEN
        'call_' || (m.body -> 'call' ->> 'assistant') || '_' || (m.body -> 'call' ->> 'index')
    END AS tool_call_id,
    CASE m.kind WHEN 'tool' THEN m.body ->> 'name' END AS tool_name,
    m.model, m.input_tokens, m.output_tokens, m.cost, m.created_at AS timestamp, m.created_at
FROM crow.entry_bodies m
WHERE m.kind IN ('user', 'assistant', 'tool');

-- One row per call. `tool_call_id` is the id that the editor sees; it is unique. `tool_result`, `success` and
-- `duration_ms` are NULL for a call that has no result.
CREATE VIEW crow.tool_calls AS
SELECT 'call_' || a.id || '_' || (call.number - 1) AS tool_call_id, a.session AS session_id, a.id AS message_id, a.turn,
    call.value ->> 'name' AS tool_name, call.value ->> 'arguments' AS tool_args,
    (SELECT m.content FROM crow.messages m WHERE m.id = r.id) AS tool_result,
    NOT (r.body ->> 'is_error')::boolean AS success, (r.body ->> 'duration_ms')::bigint AS duration_ms,
    r.id AS result_entry, a.model, a.created_at AS timestamp, a.created_at
FROM crow.entry_bodies a
CROSS JOIN LATERAL json_array_elements(a.body -> 'calls') WITH ORDINALITY AS call (value, number)
LEFT JOIN LATERAL (
    SELECT e.id, crow.body_of(e.body, b.data) AS body FROM crow.entries e LEFT JOIN crow.blobs b ON b.hash = e.body_blob
    WHERE e.kind = 'tool' AND e.call_entry = a.id AND e.call_index = call.number - 1
) r ON true
WHERE a.kind = 'assistant';

-- Checkpoints and masks. `restored` is true when one no longer counts on some branch. `before_message_count` and
-- `after_message_count` say how many messages (prompts, answers, tool results, a summary) the model saw before and
-- after a checkpoint. They are NULL for a mask, which hides old tool results but keeps all messages.
CREATE VIEW crow.compaction_history AS
SELECT c.id, c.session AS session_id, c.kind, c.body ->> 'reason' AS reason, c.body ->> 'method' AS method,
    coalesce(c.body ->> 'first_kept', c.body ->> 'before')::bigint AS first_kept,
    (c.body ->> 'tokens_before')::bigint AS tokens_before, (c.body ->> 'tokens_after')::bigint AS tokens_after,
    (c.body ->> 'model_calls')::bigint AS model_calls, c.body ->> 'summary' AS summary,
    EXISTS (
        SELECT 1 FROM crow.entry_bodies r WHERE r.conversation = c.conversation AND r.kind = 'restore'
        AND (r.body ->> 'entry')::bigint = c.id
    ) AS restored,
    CASE c.kind WHEN 'checkpoint' THEN (
        -- `kept` is the first entry that the previous checkpoint of this path kept.
        WITH RECURSIVE path (id, parent, kind, kept) AS (
            SELECT e.id, e.parent, e.kind, NULL::bigint FROM crow.entries e WHERE e.id = c.parent
            UNION ALL
            SELECT e.id, e.parent, e.kind, CASE
                WHEN path.kept IS NULL AND path.kind = 'checkpoint' AND NOT EXISTS (
                    SELECT 1 FROM crow.entry_bodies r WHERE r.conversation = c.conversation AND r.kind = 'restore'
                    AND r.id < c.id AND (r.body ->> 'entry')::bigint = path.id
                ) THEN (
                    SELECT coalesce((p.body ->> 'first_kept')::bigint, p.id) FROM crow.entry_bodies p
                    WHERE p.id = path.id
                )
                ELSE path.kept
            END
            FROM path JOIN crow.entries e ON e.id = path.parent
            WHERE path.id > coalesce(path.kept, 0)
        )
        SELECT count(*) FILTER (WHERE kind IN ('user', 'assistant', 'tool') AND id >= coalesce(kept, 0))
            + (max(kept) IS NOT NULL)::int
        FROM path
    ) END AS before_message_count,
    CASE c.kind WHEN 'checkpoint' THEN (
        WITH RECURSIVE path (id, parent, kind) AS (
            SELECT e.id, e.parent, e.kind FROM crow.entries e
            WHERE e.id = c.parent AND e.id >= (c.body ->> 'first_kept')::bigint
            UNION ALL
            SELECT e.id, e.parent, e.kind FROM path JOIN crow.entries e ON e.id = path.parent
            WHERE e.id >= (c.body ->> 'first_kept')::bigint
        )
        SELECT count(*) + 1 FROM path WHERE kind IN ('user', 'assistant', 'tool')
    ) END AS after_message_count,
    c.model, c.created_at AS timestamp, c.created_at
FROM crow.entry_bodies c
WHERE c.kind IN ('checkpoint', 'mask');

-- The skills that each session loaded. `skill_content` is the text of the last time.
CREATE VIEW crow.session_skills AS
SELECT s.session AS session_id, s.name AS skill_name, s.first_entry, s.times, newest.body ->> 'text' AS skill_content,
    s.created_at AS timestamp, s.created_at
FROM (
    SELECT session, body ->> 'name' AS name, min(id) AS first_entry, max(id) AS last_entry, count(*) AS times,
        min(created_at) AS created_at
    FROM crow.entry_bodies WHERE kind = 'skill'
    GROUP BY session, body ->> 'name'
) s
JOIN crow.entry_bodies newest ON newest.id = s.last_entry;

-- Sums by session, model and day (UTC). An entry counts once, however many forks share it. The usage of a sub-agent
-- counts for its own session (`sessions.parent_id` names the session that started it).
CREATE VIEW crow.usage AS
SELECT session AS session_id, model, (crow.time_of(created_ms) AT TIME ZONE 'UTC')::date AS day, count(*) AS requests,
    sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens, sum(cached_tokens) AS cached_tokens,
    sum(reasoning_tokens) AS reasoning_tokens, sum(cost) AS cost,
    sum(cache_write_tokens) AS cache_write_tokens, count(nullif(estimated, 0)) AS estimated_requests
FROM crow.entries
WHERE kind <> 'tool' AND (input_tokens IS NOT NULL OR output_tokens IS NOT NULL OR cost IS NOT NULL)
GROUP BY 1, 2, 3;
