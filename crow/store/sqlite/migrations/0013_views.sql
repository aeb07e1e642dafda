-- What people ask about sessions in SQL. `schemas/store.md` lists the name of each column, and its aliases.
DROP VIEW session_list;
DROP VIEW messages;
DROP VIEW compaction_history;
DROP VIEW session_skills;

-- The sessions that crow lists, newest first. `message_count` counts the prompts and answers on the session's path.
-- `is_compacted` is 1 if a compaction that was not undone is on it. The last three columns name the programs that opened
-- the session last; they are NULL in sessions of older versions.
CREATE VIEW session_list AS
SELECT s.id AS session_id, s.title, s.created_at, s.updated_at, s.workspace_path,
    (WITH RECURSIVE path (id, parent, kind) AS (
        SELECT e.id, e.parent, e.kind FROM entries e WHERE e.id = s.leaf
        UNION ALL
        SELECT e.id, e.parent, e.kind FROM path JOIN entries e ON e.id = path.parent WHERE e.id < path.id
     )
     SELECT count(*) FROM path WHERE kind IN ('user', 'assistant')) AS message_count,
    s.model, s.mode, s.state, s.tokens_in, s.tokens_out, s.tokens_cached, s.cost,
    s.files_changed, s.lines_added, s.lines_removed, s.archived, s.alias, s.forked_from, s.metadata,
    (WITH RECURSIVE path (id, parent, kind) AS (
        SELECT e.id, e.parent, e.kind FROM entries e WHERE e.id = s.leaf
        UNION ALL
        SELECT e.id, e.parent, e.kind FROM path JOIN entries e ON e.id = path.parent WHERE e.id < path.id
     )
     SELECT EXISTS (
        SELECT 1 FROM path c WHERE c.kind IN ('checkpoint', 'mask') AND NOT EXISTS (
            SELECT 1 FROM path p JOIN entry_bodies r ON r.id = p.id
            WHERE p.kind = 'restore' AND json_extract(r.body, '$.entry') = c.id
        )
     )) AS is_compacted,
    iif(json_valid(s.config), json_extract(s.config, '$.crow'), NULL) AS crow_version,
    iif(json_valid(s.config), json_extract(s.config, '$.client.name'), NULL) AS client_name,
    iif(json_valid(s.config), json_extract(s.config, '$.client.version'), NULL) AS client_version
FROM sessions s
WHERE s.has_prompt = 1 AND s.parent_id IS NULL AND s.deleted_ms IS NULL
ORDER BY s.newest_entry DESC;

-- System messages, prompts, answers and tool results. `tool_call_id`, `tool_name` and `tool_args` are set for results
-- only. `tokens` is the size of the message; `tokens_estimated` is 1 if crow estimated it. In place of a compressed
-- text, `content` says so.
CREATE VIEW messages AS
SELECT m.id, m.session, m.conversation, m.parent, m.turn, iif(m.kind = 'prompt', 'system', m.kind) AS role,
    CASE m.kind
        WHEN 'user' THEN (
            SELECT group_concat(json_extract(part.value, '$.text'), char(10)) FROM json_each(m.body, '$.parts') part
            WHERE json_extract(part.value, '$.type') = 'text'
        )
        WHEN 'prompt' THEN (
            SELECT iif(length(b.data) < b.size, printf('[%d bytes, compressed]', b.size), CAST(b.data AS TEXT))
            FROM blobs b WHERE b.hash = json_extract(m.body, '$.system.blob')
        )
        ELSE CASE json_type(m.body, '$.text')
            WHEN 'object' THEN (
                SELECT CASE
                    WHEN length(b.data) < b.size
                    THEN printf('[%d bytes, compressed: crow sessions show %s --call call_%d_%d]', b.size, m.session,
                        json_extract(m.body, '$.call.assistant'), json_extract(m.body, '$.call.index'))
                    ELSE CAST(b.data AS TEXT)
                END
                FROM blobs b WHERE b.hash = json_extract(m.body, '$.text.blob')
            )
            ELSE json_extract(m.body, '$.text')
        END
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
    replace(substr(m.created, 1, 23), 'T', ' ') AS created_at,
    CASE m.kind WHEN 'tool' THEN (
        SELECT json_extract(a.body, '$.calls[' || json_extract(m.body, '$.call.index') || '].arguments')
        FROM entry_bodies a WHERE a.id = json_extract(m.body, '$.call.assistant')
    ) END AS tool_args,
    iif(m.kind = 'assistant', m.output_tokens, m.estimate) AS tokens,
    CASE
        WHEN m.kind <> 'assistant' THEN iif(m.estimate IS NULL, NULL, 1)
        WHEN m.output_tokens IS NOT NULL
        THEN (SELECT coalesce(e.estimated, 0) & 2 <> 0 FROM entries e WHERE e.id = m.id)
    END AS tokens_estimated
FROM entry_bodies m
WHERE m.kind IN ('user', 'assistant', 'tool', 'prompt');

-- Compactions: summaries, and outputs that were hidden from the model. `restored` is 1 when one no longer counts on some
-- branch. `before_message_count` and `after_message_count` say how many messages (prompts, answers, tool results, a
-- summary) the model saw before and after a summary. They are NULL for hidden outputs, because all messages are kept.
-- `threshold` and `context_window` are those at that time, in tokens; `asked` is what the summary was asked to favour.
CREATE VIEW compaction_history AS
SELECT c.id, c.session, c.kind, nullif(json_extract(c.body, '$.reason'), '') AS reason, json_extract(c.body, '$.method') AS method,
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
    replace(substr(c.created, 1, 23), 'T', ' ') AS created_at,
    CASE c.kind WHEN 'mask' THEN 'hidden outputs' ELSE 'summary' END AS compaction,
    json_extract(c.body, '$.threshold') AS threshold, json_extract(c.body, '$.window') AS context_window,
    nullif(json_extract(c.body, '$.focus'), '') AS asked
FROM entry_bodies c
WHERE c.kind IN ('checkpoint', 'mask');

-- The skills that each session loaded. `loaded_at` is the first time, and `skill_content` the text of the last time.
CREATE VIEW session_skills AS
SELECT s.session, s.name, s.first_entry, s.times, s.created,
    s.session AS session_id,
    s.name AS skill_name,
    json_extract(newest.body, '$.text') AS skill_content,
    replace(substr(s.created, 1, 23), 'T', ' ') AS timestamp,
    replace(substr(s.created, 1, 23), 'T', ' ') AS created_at,
    replace(substr(s.created, 1, 23), 'T', ' ') AS loaded_at
FROM (
    SELECT session, json_extract(body, '$.name') AS name, min(id) AS first_entry, max(id) AS last_entry,
        count(*) AS times, min(created) AS created
    FROM entry_bodies WHERE kind = 'skill'
    GROUP BY session, json_extract(body, '$.name')
) s
JOIN entry_bodies newest ON newest.id = s.last_entry;
