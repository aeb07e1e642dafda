-- A long tool output, and each side of a long diff, is a blob of its own, so that equal ones are stored once. In the body
-- of its entry stands {"blob": HASH} in its place. Older versions of crow cannot read that.
DROP VIEW messages;
DROP VIEW tool_calls;

-- Prompts, answers and tool results. `tool_call_id` and `tool_name` are set for results only.
CREATE VIEW messages AS
SELECT m.id, m.session, m.conversation, m.parent, m.turn, m.kind AS role,
    CASE m.kind
        WHEN 'user' THEN (
            SELECT group_concat(json_extract(part.value, '$.text'), char(10)) FROM json_each(m.body, '$.parts') part
            WHERE json_extract(part.value, '$.type') = 'text'
        )
        ELSE CASE json_type(m.body, '$.text')
            WHEN 'object' THEN (SELECT CAST(b.data AS TEXT) FROM blobs b WHERE b.hash = json_extract(m.body, '$.text.blob'))
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
    replace(substr(m.created, 1, 23), 'T', ' ') AS created_at
FROM entry_bodies m
WHERE m.kind IN ('user', 'assistant', 'tool');

-- One row per call. `tool_call_id` is the id that the editor sees; it is unique. `tool_result`, `success` and
-- `duration_ms` are NULL for a call that has no result.
CREATE VIEW tool_calls AS
SELECT a.id AS assistant, call.key AS call_index, a.session, a.turn,
    json_extract(call.value, '$.name') AS name,
    json_extract(call.value, '$.arguments') AS args,
    (SELECT m.content FROM messages m WHERE m.id = r.id) AS result,
    (SELECT NOT json_extract(b.body, '$.is_error') FROM entry_bodies b WHERE b.id = r.id) AS success,
    (SELECT json_extract(b.body, '$.duration_ms') FROM entry_bodies b WHERE b.id = r.id) AS duration_ms,
    r.id AS result_entry, a.created,
    'call_' || a.id || '_' || call.key AS tool_call_id,
    a.session AS session_id,
    a.id AS message_id,
    json_extract(call.value, '$.name') AS tool_name,
    json_extract(call.value, '$.arguments') AS tool_args,
    (SELECT m.content FROM messages m WHERE m.id = r.id) AS tool_result,
    a.model,
    replace(substr(a.created, 1, 23), 'T', ' ') AS timestamp,
    replace(substr(a.created, 1, 23), 'T', ' ') AS created_at
FROM entry_bodies a
JOIN json_each(a.body, '$.calls') call
LEFT JOIN entries r ON r.kind = 'tool' AND r.call_entry = a.id AND r.call_index = call.key
WHERE a.kind = 'assistant';
