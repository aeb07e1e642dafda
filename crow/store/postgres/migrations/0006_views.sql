-- What people ask about sessions in SQL. `schemas/store.md` lists the name of each column, and its aliases.

-- `is_compacted` says whether a compaction that was not undone is on the session's path. The last three columns name the
-- programs that opened the session last; they are NULL in sessions of older versions.
CREATE OR REPLACE VIEW crow.session_list AS
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
    crow.body_of(s.metadata, NULL) AS metadata,
    (
        WITH RECURSIVE path (id, parent, kind) AS (
            SELECT e.id, e.parent, e.kind FROM crow.entries e WHERE e.id = s.leaf
            UNION ALL
            SELECT e.id, e.parent, e.kind FROM path JOIN crow.entries e ON e.id = path.parent
        )
        SELECT EXISTS (
            SELECT 1 FROM path c WHERE c.kind IN ('checkpoint', 'mask') AND NOT EXISTS (
                SELECT 1 FROM path p JOIN crow.entry_bodies r ON r.id = p.id
                WHERE p.kind = 'restore' AND (r.body ->> 'entry')::bigint = c.id
            )
        )
    ) AS is_compacted,
    crow.body_of(s.config, NULL) ->> 'crow' AS crow_version,
    crow.body_of(s.config, NULL) -> 'client' ->> 'name' AS client_name,
    crow.body_of(s.config, NULL) -> 'client' ->> 'version' AS client_version
FROM crow.sessions s
WHERE s.has_prompt AND s.parent_id IS NULL AND s.deleted_ms IS NULL
ORDER BY s.newest_entry DESC;

-- System messages, prompts, answers and tool results. `tool_call_id`, `tool_name` and `tool_args` are set for results
-- only. `tokens` is the size of the message; `tokens_estimated` says whether crow estimated it.
CREATE OR REPLACE VIEW crow.messages AS
SELECT m.id, m.session AS session_id, m.conversation, m.parent, m.turn,
    CASE m.kind WHEN 'prompt' THEN 'system' ELSE m.kind END AS role,
    CASE
        WHEN m.kind = 'user' THEN (
            SELECT string_agg(part ->> 'text', E'\n') FROM json_array_elements(m.body -> 'parts') AS p (part)
            WHERE part ->> 'type' = 'text'
        )
        WHEN m.kind = 'prompt' THEN (
            SELECT crow.text_of(b.data) FROM crow.blobs b WHERE b.hash = m.body -> 'system' ->> 'blob'
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
    m.model, m.input_tokens, m.output_tokens, m.cost, m.created_at AS timestamp, m.created_at,
    CASE m.kind WHEN 'tool' THEN (
        SELECT a.body -> 'calls' -> (m.body -> 'call' ->> 'index')::int ->> 'arguments'
        FROM crow.entry_bodies a WHERE a.id = (m.body -> 'call' ->> 'assistant')::bigint
    ) END AS tool_args,
    CASE m.kind WHEN 'assistant' THEN m.output_tokens ELSE m.estimate END AS tokens,
    CASE
        WHEN m.kind <> 'assistant' THEN CASE WHEN m.estimate IS NOT NULL THEN true END
        WHEN m.output_tokens IS NOT NULL
        THEN (SELECT coalesce(e.estimated, 0)::int & 2 <> 0 FROM crow.entries e WHERE e.id = m.id)
    END AS tokens_estimated
FROM crow.entry_bodies m
WHERE m.kind IN ('user', 'assistant', 'tool', 'prompt');

-- `compaction` says what was done: a summary was written, or outputs were hidden from the model. `threshold` and
-- `context_window` are those at that time, in tokens; `asked` is what the summary was asked to favour.
CREATE OR REPLACE VIEW crow.compaction_history AS
SELECT c.id, c.session AS session_id, c.kind, nullif(c.body ->> 'reason', '') AS reason, c.body ->> 'method' AS method,
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
    c.model, c.created_at AS timestamp, c.created_at,
    CASE c.kind WHEN 'mask' THEN 'hidden outputs' ELSE 'summary' END AS compaction,
    (c.body ->> 'threshold')::bigint AS threshold, (c.body ->> 'window')::bigint AS context_window,
    nullif(c.body ->> 'focus', '') AS asked
FROM crow.entry_bodies c
WHERE c.kind IN ('checkpoint', 'mask');

-- `loaded_at` is the first time, and `skill_content` the text of the last time.
CREATE OR REPLACE VIEW crow.session_skills AS
SELECT s.session AS session_id, s.name AS skill_name, s.first_entry, s.times, newest.body ->> 'text' AS skill_content,
    s.created_at AS timestamp, s.created_at, s.created_at AS loaded_at
FROM (
    SELECT session, body ->> 'name' AS name, min(id) AS first_entry, max(id) AS last_entry, count(*) AS times,
        min(created_at) AS created_at
    FROM crow.entry_bodies WHERE kind = 'skill'
    GROUP BY session, body ->> 'name'
) s
JOIN crow.entry_bodies newest ON newest.id = s.last_entry;
