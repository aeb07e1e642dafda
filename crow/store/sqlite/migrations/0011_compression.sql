-- Blobs of old entries may be compressed: then `data` is a zlib stream that is shorter than `size`, as in SQLite's
-- archives. `compression` has one row, the reference (`blob_refs`) up to which that was done.
CREATE TABLE compression (
    entry INTEGER NOT NULL,
    blob TEXT NOT NULL
);
INSERT INTO compression (entry, blob) VALUES (0, '');

-- The short members of a compressed body of a tool result, for the views.
CREATE TABLE compressed_bodies (
    blob TEXT PRIMARY KEY,
    body TEXT NOT NULL
) WITHOUT ROWID;
CREATE TRIGGER compressed_bodies_go_with_their_blobs AFTER DELETE ON blobs
BEGIN
    DELETE FROM compressed_bodies WHERE blob = OLD.hash;
END;

DROP VIEW entry_bodies;

-- Every entry with its body as JSON, wherever it is stored; NULL if it is damaged. Of a compressed body, it has the short
-- members and a text that says how to read the rest.
CREATE VIEW entry_bodies AS
SELECT e.id, e.conversation, e.session, e.parent, e.turn, e.kind, e.model,
    CASE
        WHEN e.body IS NULL AND length(b.data) < b.size THEN (
            SELECT json_set(c.body, '$.text', printf('[%d bytes, compressed: crow sessions show %s --call call_%d_%d]',
                b.size, e.session, e.call_entry, e.call_index))
            FROM compressed_bodies c WHERE c.blob = b.hash
        )
        WHEN json_valid(coalesce(e.body, CAST(b.data AS TEXT))) THEN coalesce(e.body, CAST(b.data AS TEXT))
    END AS body,
    e.input_tokens, e.output_tokens, e.cached_tokens, e.reasoning_tokens, e.cost, e.estimate,
    strftime('%Y-%m-%dT%H:%M:%fZ', e.created_ms / 1000.0, 'unixepoch') AS created
FROM entries e LEFT JOIN blobs b ON b.hash = e.body_blob;

DROP VIEW messages;

-- Prompts, answers and tool results. `tool_call_id` and `tool_name` are set for results only. In place of a compressed
-- text, `content` says how to read it.
CREATE VIEW messages AS
SELECT m.id, m.session, m.conversation, m.parent, m.turn, m.kind AS role,
    CASE m.kind
        WHEN 'user' THEN (
            SELECT group_concat(json_extract(part.value, '$.text'), char(10)) FROM json_each(m.body, '$.parts') part
            WHERE json_extract(part.value, '$.type') = 'text'
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
    replace(substr(m.created, 1, 23), 'T', ' ') AS created_at
FROM entry_bodies m
WHERE m.kind IN ('user', 'assistant', 'tool');
